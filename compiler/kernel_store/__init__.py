"""Kernels that earlier compiles built and measured, on a worker's disk, apart for each namespace.
A kernel's name or key goes in; its file, binaries or winner come out. A job reads the store and offers files to it.
Imports request.codec, decoding and errors.
"""
