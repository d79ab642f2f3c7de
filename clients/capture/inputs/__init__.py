"""Inputs that a request has in another form than the program: tensors that the graph holds, DTensors, numbers.
In: Dynamo's graph and its inputs. Out: a graph with plain tensors, and how it is called.
Imports compiler.
"""
