-- Give a lease back unfinished (the dispatcher stops, or has lost the worker); another one takes the compile at once.
-- KEYS: Keys.compile_keys. ARGV: token: owner:fence; killed: 1 if its worker has died of it, else 0. Returns 1 or 0.
local _, lease, _, active, _, _, run, _, _, _, _, _, _, pending, _, priorities = unpack(KEYS)
local key, token, wake, ttl_ms, compiles_wait, killed = unpack(ARGV)
check_arguments(6)
ttl_ms, killed = whole(ttl_ms, 1), whole(killed, 0)
if redis.call('GET', lease) ~= token then
  return 0
end
check_counters(redis.call('HMGET', run, 'leases', 'killed'))
local of_job = redis.call('HEXISTS', priorities, lease) == 1
leave(lease, pending, lease)
if redis.call('HEXISTS', run, 'leases') == 1 then
  redis.call('HINCRBY', run, 'leases', -1) -- it counts holders that died
  redis.call('HINCRBY', run, 'killed', integer(killed))
end
if of_job then -- it counts for its namespace once it is taken
  redis.call('ZREM', active, key)
else
  redis.call('ZADD', active, integer(now + ttl_ms), key)
end
redis.call('PUBLISH', wake, key)
redis.call('PUBLISH', wake, compiles_wait)
return 1
