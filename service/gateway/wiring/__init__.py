"""The composition root: makes the parts of a gateway and of each of its namespaces, and runs background loops.
Settings and a pool of workers in; GatewayParts and TenantParts out.
May import every folder below gateway/.
"""
