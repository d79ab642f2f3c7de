"""A miss becomes an artifact: single flight by a lease, dispatch to a worker, signing, publication, events.
Takes a CompileRequest; publishes an artifact, or an error for every waiter.
May import cache/ and all below it.
"""
