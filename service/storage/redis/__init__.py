"""Redis: names of keys, atomic Lua scripts, connections, notifications, shared counters.
Calls in; answers of Redis out.
May import base/ and settings.
"""
