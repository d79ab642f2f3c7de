"""Analysis of one rank's profiler trace.
Takes a Kineto trace and a ProfileContext. Gives a ProfileSummary with memory timelines, and advice. Needs no torch.
"""
