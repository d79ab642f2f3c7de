"""Kernel search on the workers' devices, for compiles that wait and for tuning jobs.
Tuning problems in; the winners, kept in the namespace's tuning database, out.
May import admission/, storage/ and base/; neither the dispatcher nor the cache.
"""
