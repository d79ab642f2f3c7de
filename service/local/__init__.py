"""`torchrelay up`: a whole service on one machine; `torchrelay signer`: the keys alone.
Takes settings; runs redis-server, Ray's workers and the gateway, and ends them together.
May import everything below; imported by `__main__` alone.
"""
