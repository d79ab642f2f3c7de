"""A program: what Dynamo made of a function or module, so that the next process need not trace it.
In: code objects, functions and classes of a process. Out: their names and digests, and the records of a program.
No torch. Imports nothing of the package.
"""
