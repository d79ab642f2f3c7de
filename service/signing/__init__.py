"""The installation's Ed25519 keys: the only folder that touches private keys.
An artifact in; the signed artifact, or whose signatures count here, out.
May import storage/private_files and compiler/.
"""
