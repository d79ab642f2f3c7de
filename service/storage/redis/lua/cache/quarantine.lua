-- Take out an index entry whose blob is lost, damaged or signed by nobody who counts, and take back what lookup.lua
-- counted. What Redis holds of it expires.
-- KEYS: index, lru, sizes, total, stats, inline, pinned, audit.
-- ARGV: key, digest, 'hit' or 'fetch', prefix of blobs, ms until the blob expires, most audit entries, fields of
--       the audit entry ...
-- Returns 1 if this call dropped it: an entry published since, with another digest, stays.
local entry = redis.call('HMGET', KEYS[1], 'digest', 'size', 'seconds', 'place')
if ARGV[3] == 'hit' then
  redis.call('HINCRBY', KEYS[5], 'requests', -1)
  redis.call('HINCRBY', KEYS[5], 'hits', -1)
else
  redis.call('HINCRBY', KEYS[5], 'fetches', -1)
end
if entry[1] ~= ARGV[2] then
  return 0
end
if ARGV[3] == 'hit' then
  redis.call('HINCRBYFLOAT', KEYS[5], 'seconds_saved', '-' .. entry[3])
end
redis.call('HINCRBY', KEYS[5], 'bytes_served', string.format('%.0f', 0 - entry[2]))
redis.call('HINCRBY', KEYS[5], 'damaged', 1)
if entry[4] == 'redis' then
  redis.call('DECRBY', KEYS[6], entry[2])
  redis.call('PEXPIRE', ARGV[4] .. entry[1], ARGV[5])
end
redis.call('DEL', KEYS[1])
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('ZREM', KEYS[7], ARGV[1])
redis.call('DECRBY', KEYS[4], redis.call('HGET', KEYS[3], ARGV[1]) or 0)
redis.call('HDEL', KEYS[3], ARGV[1])
redis.call('XADD', KEYS[8], 'MAXLEN', '~', ARGV[6], '*', unpack(ARGV, 7))
return 1
