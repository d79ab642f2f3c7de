"""The gateway as an ASGI app, which answers HTTP requests and sends event streams.
routes/ says what each request does, http/ is what all routes share, parts.py makes the parts once.
May import every folder below; holds no state of its own besides the parts.
"""
