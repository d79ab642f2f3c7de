"""The program of a rank: runs a script or a function as Python itself would.
In: the script's arguments and the job's spec. Out: an exit code; metrics, profiles and files on the way.
"""
