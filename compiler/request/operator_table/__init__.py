"""The closed table of operators, methods and options that a request may name, for each torch version.
A torch version goes in; an OperatorTable comes out. generate.py makes operators.json from PyTorch's own lists.
Imports decoding and errors.
"""
