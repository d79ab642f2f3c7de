"""Where state lies: Redis, the blob store, private files on disk.
Keys and bytes in; bytes out.
May import base/ and settings.
"""
