"""Processes with PyTorch imported, of which a job's ranks are forked, on the nodes that may get ranks.
In: a job's order; launches over a socket. Out: a rank's reaper and the rank.
Imports ranks, scheduling's resource names and process.
"""
