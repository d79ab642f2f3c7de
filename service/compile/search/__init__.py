"""Kernel search on the workers' devices, for compiles that wait and for tuning jobs.
Takes tuning problems; stores the winners in the namespace's tuning database.
May import single flight's priorities, admission/, storage/ and base/; neither the dispatcher nor the cache.
"""
