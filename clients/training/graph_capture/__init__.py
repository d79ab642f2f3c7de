"""The capture run: a script's first step under fake process groups.
In: a script or function, the environment of rank 0. Out: the requests of all graphs that the ranks will ask for.
"""
