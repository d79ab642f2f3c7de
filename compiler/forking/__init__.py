"""Forks of this process, and messages between a fork and the process that made it.
In: a function, or the bytes that it is given. Out: the messages of the fork, or that it was lost.
Imports nothing of ours.
"""
