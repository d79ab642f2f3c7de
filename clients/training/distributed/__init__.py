"""torch.distributed in a rank: data parallelism and the shutdown of process groups.
In: modules, optimizers, process groups. Out: wrapped modules; no thread at work at exit.
"""
