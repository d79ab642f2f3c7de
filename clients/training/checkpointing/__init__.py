"""Checkpoints by torch.distributed.checkpoint, in a folder or an object store.
In: model, optimizer, loader and random states. Out: `step-N`, complete or absent; the same states restored.
"""
