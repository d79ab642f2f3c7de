"""What every part may need: asyncio tasks, logs, metrics, bodies over HTTP.
Knows no routes, no Redis and no signing key.
May import settings, compiler/ and workers.pool.
"""
