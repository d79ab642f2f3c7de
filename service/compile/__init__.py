"""A miss becomes an artifact: single flight by a lease, dispatch to a worker, signing, publication, events.
A CompileRequest in; a published artifact, or an error for everyone who waits, out.
May import cache/ and all below it.
"""
