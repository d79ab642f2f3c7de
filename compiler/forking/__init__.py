"""Forks of this process, and messages between a fork and the process that made it.
In: a function, or the bytes that it is given. Out: the fork's messages, or ForkedProcessLost.
Imports nothing of ours.
"""
