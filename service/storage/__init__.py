"""Where state is stored: Redis, the blob store, private files on disk.
Takes keys and bytes; returns bytes.
May import base/.
"""
