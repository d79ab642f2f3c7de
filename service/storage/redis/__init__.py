"""Redis: names of keys, atomic Lua scripts, connections, notifications, shared counters.
Every access to Redis goes through it.
May import base/ and settings.
"""
