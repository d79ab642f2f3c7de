-- End a compile with an error, and remember it for a while if it would happen again.
-- KEYS: Keys.compile_keys. ARGV: token: owner:fence; failure: JSON; negative_ms: 0 forgets. Returns 1 or 0.
local _, lease, _, active, events, request, run, waiters, failed, stats = unpack(KEYS)
local key, token, ttl_ms, wake, failure, detail, negative_ms = unpack(ARGV)
if redis.call('GET', lease) ~= token then
  return 0
end
add_event(events, run, ttl_ms, 'failed', detail, failure)
if tonumber(negative_ms) > 0 then
  redis.call('SET', failed, failure, 'PX', negative_ms)
end
redis.call('HINCRBY', stats, 'failures', 1)
redis.call('DEL', lease, run, request, waiters)
redis.call('ZREM', active, key)
redis.call('PUBLISH', wake, key)
return 1
