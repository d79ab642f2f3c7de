-- End a compile with an error, and remember it for a while if it would happen again.
-- KEYS: Keys.compile_keys. ARGV: token: owner:fence; failure: JSON; negative_ms: 0 forgets; longest_ms: if not 0,
-- negative_ms doubles with each such failure in a row, up to this. Returns 1 or 0.
local _, lease, _, active, events, request, run, waiters, failed, stats, _, _, kills, pending = unpack(KEYS)
local key, token, ttl_ms, wake, failure, detail, negative_ms, longest_ms = unpack(ARGV)
check_arguments(8)
ttl_ms, negative_ms, longest_ms = whole(ttl_ms, 1), whole(negative_ms, 0), whole(longest_ms, 0)
if redis.call('GET', lease) ~= token then
  return 0
end
check_counters({redis.call('GET', kills), redis.call('HGET', stats, 'failures')})
add_event(events, run, ttl_ms, 'failed', detail, failure)
if longest_ms > 0 then
  local times = redis.call('INCRBY', kills, 1)
  redis.call('PEXPIRE', kills, integer(24 * longest_ms))
  negative_ms = math.min(negative_ms * 2 ^ math.max(times - 1, 0), math.max(negative_ms, longest_ms))
end
if negative_ms > 0 then
  redis.call('SET', failed, failure, 'PX', integer(negative_ms))
end
count(stats, 'failures', 1)
redis.call('DEL', lease, run, request, waiters)
redis.call('ZREM', active, key)
redis.call('ZREM', pending, lease)
redis.call('PUBLISH', wake, key)
return 1
