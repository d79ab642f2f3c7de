"""Published artifacts by key: lookup, publication, eviction, administration, and why a request missed.
Takes a key; returns a verified artifact's bytes, or None.
May import access/, admission/, signing/, storage/ and base/.
"""
