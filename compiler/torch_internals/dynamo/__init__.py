"""What is passed between Dynamo and a back end: graphs, fake tensors, symbolic sizes, operators, errors.
In: what Dynamo passes, or a request's description of it; out: plain values, or what AOTAutograd takes.
May import patching, compiler.tuning and compiler.errors.
"""
