"""Published artifacts by key: lookup, publication, eviction, administration, and why a request missed.
A key in; a verified artifact's bytes, or None, out.
May import access/, admission/, signing/, storage/ and base/.
"""
