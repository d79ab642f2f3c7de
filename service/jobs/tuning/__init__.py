"""Tuning jobs: operators, graphs and kernels to be tuned ahead of time.
A TuneRequest in; results for each item out.
May import compile/ and all below it.
"""
