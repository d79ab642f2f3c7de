"""Kernel search: which of an operator's correct candidates is fastest, in a compile or in a search worker.
Candidates or problems go in; winners with their timings come out. Reads and reports to the namespace's database.
Imports graph, torch_internals, api, kernel_store, process and tuning.
"""
