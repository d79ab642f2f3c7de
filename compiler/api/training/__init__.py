"""Messages of training jobs: between submitter, gateway, nodes and ranks; and the packed working directory.
A job's description goes in; its state, events and files come out.
Imports errors.
"""
