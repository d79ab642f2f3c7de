"""The installation's Ed25519 keys: the only folder that touches private keys, in this process or in a signer's.
Takes artifacts; returns them signed, and says which signatures are trusted.
May import storage/private_files, base/http_bodies, settings and compiler/.
"""
