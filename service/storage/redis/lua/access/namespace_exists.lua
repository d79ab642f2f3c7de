-- Whether a namespace exists. A script, so that it is asked of a replica while the primary does not answer: a gateway's
-- first hit for a namespace needs it. KEYS: namespaces. ARGV: its name. Returns 1 or 0.
check_arguments(1)
return redis.call('HEXISTS', KEYS[1], ARGV[1])
