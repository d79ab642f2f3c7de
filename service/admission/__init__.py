"""What may be compiled: limits on a body's bytes and time, decoding, checks, the cache key.
An HTTP body in; a CompileRequest out.
May import storage/, base/ and settings.
"""
