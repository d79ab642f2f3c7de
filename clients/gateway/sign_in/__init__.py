"""Tokens of an OpenID Connect provider: the first by the device flow, later ones by a refresh token; tokens in files.
In: what the gateway says of its provider, the credentials file. Out: the token of each request.
"""
