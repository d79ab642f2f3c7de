"""One module for each resource under /v1, which takes requests and answers them.
graphs/ has compiles, jobs/ tuning and training jobs, admin/ what administrators do.
May import ../http and ../parts.
"""
