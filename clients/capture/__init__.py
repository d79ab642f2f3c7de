"""What Dynamo hands to the back end (graph, inputs, ambient state) becomes a canonical request.
In: a torch.fx.GraphModule, example inputs, user-written Triton kernels, the tuning lock. Out: a GraphRequest.
Imports compiler, jobfiles and settings. Knows no HTTP.
"""
