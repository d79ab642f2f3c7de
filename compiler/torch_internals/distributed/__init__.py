"""torch.distributed: the job's store, fake process groups, device meshes and DTensors.
In: tensors, meshes and groups; out: local shards, meshes of a simulated job, the store.
May import patching and compiler.errors.
"""
