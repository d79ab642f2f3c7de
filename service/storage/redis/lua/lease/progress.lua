-- Append one event of a compile; only the lease's holder may.
-- KEYS: Keys.compile_keys. ARGV: token: owner:fence. Returns 1 or 0.
local _, lease, _, _, events, _, run = unpack(KEYS)
local key, token, ttl_ms, wake, stage, detail = unpack(ARGV)
check_arguments(6)
ttl_ms = whole(ttl_ms, 1)
if redis.call('GET', lease) ~= token then
  return 0
end
add_event(events, run, ttl_ms, stage, detail, '')
redis.call('PUBLISH', wake, key)
return 1
