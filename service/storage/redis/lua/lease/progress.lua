-- Append one event of a compile; only the lease's holder may.
-- KEYS: lease, events, run. ARGV: key, owner:fence, stage, detail, ttl ms, wake channel. Returns 1 or 0.
if redis.call('GET', KEYS[1]) ~= ARGV[2] then
  return 0
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local started = tonumber(redis.call('HGET', KEYS[3], 'started') or now)
redis.call('XADD', KEYS[2], 'MAXLEN', '~', 1000, '*', 'stage', ARGV[3], 'seconds',
  string.format('%.3f', (now - started) / 1000), 'detail', ARGV[4], 'error', '')
redis.call('PEXPIRE', KEYS[2], ARGV[5])
redis.call('PUBLISH', ARGV[6], ARGV[1])
return 1
