"""What a client asks for: the message, its canonical bytes, its key, and the check at the gate.
Bytes from anyone go in; a checked GraphRequest and its cache key come out. Torch-free: the gateway runs it.
Imports tuning, decoding and errors.
"""
