"""Between torch and the request: FX graphs, ambient state, Inductor's options, DTensor calls, this machine's toolchain.
A GraphModule and the process' state go in, parts of a GraphRequest come out; and back.
Imports torch_internals, request, tuning and errors.
"""
