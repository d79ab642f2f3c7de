"""Inductor's choice among an operator's implementations, made by a caller instead.
In: an operator's candidates; out: their descriptions, built and run on example inputs, and the one chosen.
May import cpp, dynamo, inductor, patching, compiler.tuning and compiler.errors.
"""
