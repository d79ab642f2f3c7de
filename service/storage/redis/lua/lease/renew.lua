-- Keep a lease alive, and learn whether anybody still wants the compile. A lease that vanished with nobody
-- in its place (a stall, or Redis lost its memory) is taken again under a new fence.
-- KEYS: index, lease, fence, active, events, request, run, waiters.
-- ARGV: key, owner, lease ms, request body, ttl ms, finish '1' or '0', wake channel, abandon ms.
-- Returns {'held' or 'retaken', fence, wanted 1 or 0}, {'lost'} or {'published'}.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local expiry = string.format('%.0f', now + ARGV[3])
local lease = redis.call('GET', KEYS[2])
local owner, held = (lease or ''):match('^(.*):(%d+)$')
if owner == ARGV[2] then -- ours, maybe under a newer fence than this caller knows
  redis.call('PEXPIRE', KEYS[2], ARGV[3])
  redis.call('ZADD', KEYS[4], expiry, ARGV[1])
  redis.call('PEXPIRE', KEYS[6], ARGV[5])
  redis.call('PEXPIRE', KEYS[7], ARGV[5])
  redis.call('PEXPIRE', KEYS[5], ARGV[5])
  redis.call('ZREMRANGEBYSCORE', KEYS[8], '-inf', string.format('%.0f', now))
  if redis.call('HGET', KEYS[7], 'finish') == '1' or redis.call('ZCARD', KEYS[8]) > 0 then
    return {'held', held, 1}
  end
  return {'held', held, 0}
end
if lease then
  return {'lost'}
end
if redis.call('EXISTS', KEYS[1]) == 1 then
  return {'published'}
end
local fence = tonumber(redis.call('GET', KEYS[3]) or '0') + 1
local clock = time[1] * 1000000 + time[2]
if fence < clock then
  fence = clock
end
fence = string.format('%.0f', fence)
redis.call('SET', KEYS[3], fence)
redis.call('SET', KEYS[2], ARGV[2] .. ':' .. fence, 'PX', ARGV[3])
redis.call('ZADD', KEYS[4], expiry, ARGV[1])
redis.call('SET', KEYS[6], ARGV[4], 'PX', ARGV[5])
redis.call('HSETNX', KEYS[7], 'started', string.format('%.0f', now))
if ARGV[6] == '1' then
  redis.call('HSET', KEYS[7], 'finish', '1')
end
redis.call('PEXPIRE', KEYS[7], ARGV[5])
redis.call('ZADD', KEYS[8], string.format('%.0f', now + ARGV[8]), ARGV[2])
redis.call('PEXPIRE', KEYS[8], ARGV[5])
local started = tonumber(redis.call('HGET', KEYS[7], 'started'))
redis.call('XADD', KEYS[5], '*', 'stage', 'queued', 'seconds', string.format('%.3f', (now - started) / 1000),
  'detail', 'the lease was taken again', 'error', '')
redis.call('PEXPIRE', KEYS[5], ARGV[5])
redis.call('PUBLISH', ARGV[7], ARGV[1])
return {'retaken', fence, 1}
