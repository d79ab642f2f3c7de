"""What a graph gives when it runs, eagerly or compiled, and whether two results are the same up to rounding.
In: a graph and its inputs. Out: nothing, or VerifyFailed with the first difference.
Imports graph, torch_internals and errors.
"""
