"""The process that has torch imported and runs each job in a fresh child of itself.
In: commands over a socket (workers/messages.py). Out: responses; nothing of a finished job is left.
Imports sandbox, process, messages, settings and the compiler.
"""
