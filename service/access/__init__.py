"""Who may do what: bearer tokens with their rate limits, namespaces, quotas, the audit log.
A token in; a Grant out.
May import storage/, base/ and settings.
"""
