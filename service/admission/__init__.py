"""What may be compiled: limits on a body's bytes and time, decoding, checks, the cache key.
Takes an HTTP body; returns a CompileRequest.
May import storage/ and base/.
"""
