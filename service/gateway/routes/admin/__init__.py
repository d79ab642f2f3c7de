"""What administrators do: cache entries, tokens, quotas of namespaces, signing keys, the audit log.
JSON in; JSON out.
May import ../parameters, ../../http and ../../wiring.
"""
