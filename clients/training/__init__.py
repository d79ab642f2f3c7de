"""What runs inside a training job, and what a script may import as torchrelay.train.
In: the environment that the worker sets, the user's script. Out: metrics, checkpoints, profiles and files of the job.
"""
