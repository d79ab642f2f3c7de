"""Tokens that others sign: those of OpenID Connect providers, and of Kubernetes service accounts.
Takes a JWT; returns what a token's record says, or refuses it.
May import settings.
"""
