"""Analysis of one rank's profiler trace.
A Kineto trace and what the rank knew enter; a ProfileSummary with a memory timeline, and advice, leave.
Imports compiler and atomic_file. Needs no torch.
"""
