"""Who may do what: bearer tokens with their rate limits, namespaces, quotas, the audit log.
Takes a token; returns a Grant.
May import storage/ and base/.
"""
