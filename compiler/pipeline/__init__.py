"""Compiles a checked GraphRequest into an unsigned artifact, in a process of its own.
The steps: rebuild, AOTAutograd and Inductor, kernel search, verification, packing.
Imports search, graph, torch_internals, artifact, api, kernel_store, request and tuning.
"""
