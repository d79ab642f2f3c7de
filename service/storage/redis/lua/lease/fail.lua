-- End a compile with an error, and remember it for a while if it would happen again.
-- KEYS: lease, events, run, request, active, waiters, failed, stats.
-- ARGV: key, owner:fence, error JSON, detail, negative ms (0: forget), ttl ms, wake channel. Returns 1 or 0.
if redis.call('GET', KEYS[1]) ~= ARGV[2] then
  return 0
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local started = tonumber(redis.call('HGET', KEYS[3], 'started') or now)
redis.call('XADD', KEYS[2], '*', 'stage', 'failed', 'seconds', string.format('%.3f', (now - started) / 1000),
  'detail', ARGV[4], 'error', ARGV[3])
redis.call('PEXPIRE', KEYS[2], ARGV[6])
if tonumber(ARGV[5]) > 0 then
  redis.call('SET', KEYS[7], ARGV[3], 'PX', ARGV[5])
end
redis.call('HINCRBY', KEYS[8], 'failures', 1)
redis.call('DEL', KEYS[1], KEYS[3], KEYS[4], KEYS[6])
redis.call('ZREM', KEYS[5], ARGV[1])
redis.call('PUBLISH', ARGV[7], ARGV[1])
return 1
