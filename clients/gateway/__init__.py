"""The HTTP API of a gateway: compiles, artifacts, tuning jobs, training jobs, administration.
In: typed calls with a deadline. Out: typed replies, event streams or typed errors. Needs no torch.
"""
