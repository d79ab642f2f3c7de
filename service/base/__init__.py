"""What every part may need: asyncio tasks, logs, metrics, and what the service asks of the workers' pool.
Knows no HTTP, no Redis and no signing key.
May import settings, compiler/ and workers.pool.
"""
