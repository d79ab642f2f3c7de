"""The program of a rank: runs a script or a function as Python itself would.
In: the script's arguments and the job's spec. Out: an exit code; metrics, profiles and files on the way.
Imports backend, capture.patch_compile and the rest of training but for graph_capture.
"""
