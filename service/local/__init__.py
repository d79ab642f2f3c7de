"""`torchrelay up`: a whole service on one machine, as one family of processes.
Settings in; redis-server, Ray's workers and the gateway running, and all ended together, out.
May import everything below; imported by `__main__` alone.
"""
