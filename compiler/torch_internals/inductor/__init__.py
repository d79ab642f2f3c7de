"""AOTAutograd and Inductor: configuration, compile, dry run, kernel names, AOTInductor packages.
In: a graph with its example inputs and options; out: a callable, its serialized form, or a package.
May import dynamo, patching and compiler.process.
"""
