"""What all routes share: authentication, errors, the access log, time limits, JSON, event streams, TLS.
Takes a raw request; returns a Grant, a decoded body or an error answer.
May import access/, signing/, base/ and settings; no route and not parts.py.
"""
