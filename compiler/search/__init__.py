"""Kernel search: which of an operator's candidates is fastest and right, in a compile or apart from any.
Candidates or problems go in; winners with their timings come out. Asks and tells the team's database.
Imports graph, torch_internals, api, kernel_store, forking and tuning.
"""
