"""Compares a compiled graph with eager before it is published.
verify.py decides; the rest draws inputs, judges differences and replays random numbers.
Imports rebuilt_graph of its parent, and graph, request, search and torch_internals.
"""
