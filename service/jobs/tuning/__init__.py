"""Tuning jobs: operators, graphs and kernels to be tuned ahead of time.
A TuneRequest enters; results of each item leave.
May import compile/ and all below it.
"""
