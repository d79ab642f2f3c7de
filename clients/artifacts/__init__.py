"""From a key to a callable: prefetched, from this machine's disk, from another rank or from the gateway.
In: a captured graph and its key. Out: a loaded artifact, its signature and digests verified.
autotune_cache/ obtains the winners of Triton's and Helion's own autotuners instead; programs/ starts functions that
were traced before without tracing.
"""
