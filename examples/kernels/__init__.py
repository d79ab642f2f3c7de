"""Triton kernels with a PyTorch reference each, and jobs that search for their fastest configurations."""
