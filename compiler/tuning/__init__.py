"""Kernel tuning: problems, timings and winners, tile configurations, and the messages about them. No torch.
An operator on operands of certain shapes, or a service's answer, goes in; structs, texts and digests come out.
Imports nothing of ours: everything else in `compiler` may import it.
"""
