"""Analysis of one rank's profiler trace.
In: a Kineto trace and what the rank knew. Out: ProfileSummary, a memory timeline, advice.
Imports compiler and atomic_file. Needs no torch.
"""
