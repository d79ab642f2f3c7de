-- Offer an artifact: first publish wins, and only the lease's holder publishes, or an administrator who imports:
-- that ends a compile in progress as its own result would. The blob is already stored.
-- KEYS: index, lease, lru, sizes, total, events, run, request, active, waiters, stats,
--       inline, audit.
-- ARGV: key, owner:fence or 'import', digest, size, place, namespace, seconds, components JSON, ttl ms, wake channel,
--       blob key, most audit entries, tuning problems measured and recalled, fields of the audit entry ...
-- Returns {'published', digest}, {'exists', digest}, {'refused'} or {'blobless'}.
local existing = redis.call('HGET', KEYS[1], 'digest')
if existing == ARGV[3] then
  if redis.call('HGET', KEYS[1], 'place') == 'redis' then
    redis.call('PERSIST', ARGV[11]) -- it was written again, with an expiry
  end
  return {'published', existing} -- the same call again, after a lost answer
end
if existing then
  return {'exists', existing}
end
local imported = ARGV[2] == 'import'
if not imported and redis.call('GET', KEYS[2]) ~= ARGV[2] then
  return {'refused'}
end
if ARGV[5] == 'redis' then
  if redis.call('EXISTS', ARGV[11]) == 0 then
    return {'blobless'}
  end
  redis.call('PERSIST', ARGV[11])
  redis.call('INCRBY', KEYS[12], ARGV[4])
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local stamp = string.format('%.0f', now)
redis.call('HSET', KEYS[1], 'digest', ARGV[3], 'size', ARGV[4], 'place', ARGV[5], 'namespace', ARGV[6],
  'seconds', ARGV[7], 'components', ARGV[8], 'created', stamp)
redis.call('ZADD', KEYS[3], stamp, ARGV[1])
redis.call('DECRBY', KEYS[5], redis.call('HGET', KEYS[4], ARGV[1]) or 0)
redis.call('HSET', KEYS[4], ARGV[1], ARGV[4])
redis.call('INCRBY', KEYS[5], ARGV[4])
local run = redis.call('HMGET', KEYS[7], 'started', 'joins')
local seconds = string.format('%.3f', (now - tonumber(run[1] or now)) / 1000)
redis.call('XADD', KEYS[6], '*', 'stage', 'done', 'seconds', seconds, 'detail', '', 'error', '')
redis.call('PEXPIRE', KEYS[6], ARGV[9])
if not imported then
  redis.call('HINCRBY', KEYS[11], 'compiles', 1)
  redis.call('HINCRBY', KEYS[11], 'problems_searched', ARGV[13])
  redis.call('HINCRBY', KEYS[11], 'problems_recalled', ARGV[14])
end
redis.call('HINCRBYFLOAT', KEYS[11], 'seconds_saved',
  string.format('%.6f', tonumber(run[2] or '0') * tonumber(ARGV[7])))
redis.call('DEL', KEYS[2], KEYS[7], KEYS[8], KEYS[10])
redis.call('ZREM', KEYS[9], ARGV[1])
redis.call('XADD', KEYS[13], 'MAXLEN', '~', ARGV[12], '*', unpack(ARGV, 15))
redis.call('PUBLISH', ARGV[10], ARGV[1])
return {'published', ARGV[3]}
