"""C++ kernels: instruction set, shared libraries, the precompiled header.
In: what Inductor passes to its C++ compiler; out: libraries, counts of builds, the compiler's own errors.
May import patching and compiler.kernel_store.
"""
