"""Converts torch's objects to parts of a GraphRequest, and back.
The objects: FX graphs, ambient state, Inductor's options, DTensor calls, this machine's toolchain.
Imports torch_internals, request, tuning and errors.
"""
