"""The processes of a job decide together which artifact they use, and know what each machine can load.
In: a key and what this machine has. Out: one decision for all ranks.
"""
