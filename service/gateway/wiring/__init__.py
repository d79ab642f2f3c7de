"""The composition root: makes the parts of a gateway and of each of its namespaces, and runs background loops.
Takes settings and a pool of workers; makes GatewayParts, with a TenantParts for each namespace.
May import ../http and every folder below gateway/.
"""
