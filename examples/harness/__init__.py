"""Shared by examples, benchmarks and tests: a private service, simulated machines, times and tables."""
