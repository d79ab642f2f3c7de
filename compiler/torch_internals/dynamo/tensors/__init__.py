"""A graph's input tensors as PyTorch sees them: without data, in place of others, and sharing memory.
In: example inputs. Out: fake tensors, stand-ins, guards.
Imports dynamo.
"""
