"""Processes and their folders on Linux: system calls, process trees, folders held by a lock.
In: process ids and paths. Out: what they use, and their end.
Imports nothing of the project but the compiler's errors.
"""
