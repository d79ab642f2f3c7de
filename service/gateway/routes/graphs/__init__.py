"""A graph's way: compile it, follow the compile, fetch the artifact, explain a miss, prefetch.
A GraphRequest's bytes in; the signed artifact, or where to follow its compile, out.
May import ../parameters, ../../http and ../../wiring.
"""
