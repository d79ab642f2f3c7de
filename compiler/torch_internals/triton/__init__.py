"""Triton kernels: compile workers, recorded measurements, winners in a bundle, C extensions.
In: the kernels that Inductor compiled; out: a bundle that holds winners and binaries, and timings.
May import inductor.config, patching, compiler.tuning and compiler.kernel_store.
"""
