"""Names of an artifact's members, as the worker writes them and the client reads them."""

BUNDLE = "bundle.pickle"
"""The serialized callable: PyTorch's own run-time metadata, generated Python, Triton binaries. A pickle: read
only after the signature holds."""

TRITON = "triton/"
"""Prefix of Triton's own C extensions, by triton_module_id (torch_internals/triton/extensions.py)."""

LIBRARIES = "libraries.msgpack"
"""[(argument types, C++ source, member name), ...]: which library answers which request of generated code."""
