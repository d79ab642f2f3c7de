"""The process that this code runs in: forks of it and their messages, its user's files, its environment.
In: a function, a path, variables. Out: messages of a fork or ForkedProcessLost; bytes that no other user has written.
Imports errors.
"""
