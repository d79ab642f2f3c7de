"""Routes of administrators: cache entries, tokens, quotas of namespaces, signing keys, the audit log.
Take and answer with JSON.
May import ../parameters, ../../http and ../../parts.
"""
