"""Captures what Dynamo hands to a back end as a GraphRequest, on the client; and makes it a graph again, on the worker.
FX graphs, their inputs, ambient state, Inductor's options, DTensors, user-written Triton kernels, the toolchain: each
module has both directions, or the one that there is.
Imports torch_internals, request, tuning and errors.
"""
