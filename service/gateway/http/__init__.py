"""What all routes share: authentication, errors, the access log, time limits, JSON bodies, TLS.
A raw request in; a Grant, a decoded body, or an error answer out.
May import access/, signing/, base/ and settings; no route and no wiring.
"""
