"""The installation's Ed25519 keys: the only folder that touches private keys.
Takes artifacts; returns them signed, and says which signatures are trusted.
May import storage/private_files and compiler/.
"""
