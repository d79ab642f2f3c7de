-- Renew a lease, and say whether a client still waits for the compile. A lease that vanished and that nobody took
-- (a stall, or Redis lost its memory) is taken again under a new fence.
-- KEYS: Keys.compile_keys. body: '' until it is asked for; Redis has it unless it lost its memory.
-- Returns {'held' or 'retaken', fence, wanted 1 or 0}, {'lost'}, {'published'}, or {'body'}: it is needed.
local index, lease, fence, active, events, request, run, waiters, _, _, _, _, _, pending = unpack(KEYS)
local key, owner, lease_ms, ttl_ms, wake, abandon_ms, body, needs = unpack(ARGV)
check_arguments(8)
lease_ms, ttl_ms, abandon_ms = whole(lease_ms, 1), whole(ttl_ms, 1), whole(abandon_ms, 0)
local expiry = integer(now + lease_ms)
local holder = holder_of(lease)
if holder == owner then -- maybe under a newer fence than this caller knows
  local number = hold(lease, fence, owner, lease_ms, pending, lease)
  redis.call('ZADD', active, expiry, key)
  redis.call('PEXPIRE', request, ttl_ms)
  redis.call('PEXPIRE', run, ttl_ms)
  redis.call('PEXPIRE', events, ttl_ms)
  redis.call('ZREMRANGEBYSCORE', waiters, '-inf', integer(now))
  local wanted = redis.call('HGET', run, 'finish') == '1' or redis.call('ZCARD', waiters) > 0
  return {'held', number, wanted and 1 or 0}
end
if holder then
  return {'lost'}
end
if redis.call('EXISTS', index) == 1 then
  return {'published'}
end
if body ~= '' then
  redis.call('SET', request, body, 'PX', ttl_ms)
elseif redis.call('PEXPIRE', request, ttl_ms) == 0 then
  return {'body'}
end
local number = hold(lease, fence, owner, lease_ms, pending, lease)
redis.call('ZADD', active, expiry, key)
redis.call('HSETNX', run, 'started', integer(now))
redis.call('HSET', run, 'needs', needs)
redis.call('PEXPIRE', run, ttl_ms)
redis.call('ZADD', waiters, integer(now + abandon_ms), owner)
redis.call('PEXPIRE', waiters, ttl_ms)
add_event(events, run, ttl_ms, 'queued', 'the lease was taken again', '')
redis.call('PUBLISH', wake, key)
return {'retaken', number, 1}
