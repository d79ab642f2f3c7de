"""What confines a job's processes: namespaces, Landlock, seccomp, and the paths that they may see.
In: a form of isolation and a function. Out: the function, run inside.
Imports process and the settings.
"""
