"""The only place that uses private PyTorch APIs: one function for each, with its upstream home.
In: graphs, bundles and options of other modules; out: what PyTorch makes of them. Written against torch 2.11 to 2.15.
May import compiler.errors, tuning, kernel_store and process; its own order: patching < dynamo, cpp < inductor
< triton < the rest.
"""
