"""Metrics of a rank's steps, and the channel to the worker that started it.
In: optimizer steps, DataLoader waits, the script's own values. Out: RankMessages, calls of callbacks.
"""
