"""One module for each resource under /v1: a request in; an answer out.
graphs/ is the way of a compile, jobs/ tuning and training jobs, admin/ what administrators do.
May import ../http and ../wiring.
"""
