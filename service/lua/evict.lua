-- Take the least recently used entries out of the index until the cache fits, and their blobs out of Redis;
-- the caller deletes those in the store.
-- KEYS: lru, sizes, total, stats, inline.
-- ARGV: limit in bytes, prefix of index entries, most entries for one call, prefix of blobs.
-- Returns {key, digest, place, key, digest, place, ...}. The newest entry always stays, and so does
-- what is pinned: that is not in lru.
local out = {}
local left = tonumber(ARGV[3])
while left > 0
  and tonumber(redis.call('GET', KEYS[3]) or '0') > tonumber(ARGV[1])
  and redis.call('ZCARD', KEYS[1]) > 1 do
  local key = redis.call('ZPOPMIN', KEYS[1])[1]
  local entry = redis.call('HMGET', ARGV[2] .. key, 'digest', 'place', 'size')
  redis.call('DECRBY', KEYS[3], redis.call('HGET', KEYS[2], key) or 0)
  redis.call('HDEL', KEYS[2], key)
  redis.call('DEL', ARGV[2] .. key)
  redis.call('HINCRBY', KEYS[4], 'evictions', 1)
  if entry[2] == 'redis' then
    redis.call('DECRBY', KEYS[5], entry[3])
    redis.call('DEL', ARGV[4] .. entry[1])
  end
  if entry[1] then
    out[#out + 1] = key
    out[#out + 1] = entry[1]
    out[#out + 1] = entry[2]
  end
  left = left - 1
end
return out
