-- Keep an entry from eviction, or no longer: a pinned key is in `pinned` instead of in `lru`, where evict.lua looks.
-- KEYS: index, lru, pinned, audit.
-- ARGV: key, 'pinned' or 'unpinned', most audit entries, fields of the audit entry ...
-- Returns 1, or 0 when there is no such entry.
if redis.call('EXISTS', KEYS[1]) == 0 then
  return 0
end
local from, to = KEYS[2], KEYS[3]
if ARGV[2] == 'unpinned' then
  from, to = to, from
end
local used = redis.call('ZSCORE', from, ARGV[1])
if used then
  redis.call('ZREM', from, ARGV[1])
  redis.call('ZADD', to, used, ARGV[1])
  redis.call('XADD', KEYS[4], 'MAXLEN', '~', ARGV[3], '*', unpack(ARGV, 4))
end
return 1
