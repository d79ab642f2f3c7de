"""Commands for administrators and the service's owner: audit, cache, keys, namespace, stats, token.
Takes arguments. Prints tables or JSON of the service's records.
"""
