"""Routes of a graph: compile it, follow the compile, fetch the artifact, explain a miss, prefetch.
Take a GraphRequest's bytes; answer with the signed artifact, or with where to follow its compile.
May import ../parameters, ../../http and ../../parts.
"""
