"""The compile itself: rebuild, AOTAutograd and Inductor, kernel search, verification, packing.
A checked GraphRequest goes in; an unsigned artifact comes out. Runs in a process of its own.
Imports search, graph, torch_internals, artifact, api, kernel_store, request and tuning.
"""
