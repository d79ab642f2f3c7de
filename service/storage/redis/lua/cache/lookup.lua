-- A hit in one round trip: the index entry, the blob if Redis holds it, last use and counters.
-- KEYS: Keys.entry_keys. ARGV: use: 'hit' or 'fetch'. Returns nil, or {digest, size, place, blob or nil}.
local index, lru, pinned, _, _, _, stats = unpack(KEYS)
local key, blob_prefix, use = unpack(ARGV)
local digest, size, seconds, place = unpack(redis.call('HMGET', index, 'digest', 'size', 'seconds', 'place'))
if not digest then
  return false
end
local blob = place == 'redis' and redis.call('GET', blob_prefix .. digest)
redis.call('ZADD', lru, 'XX', integer(now), key) -- it is in one of the two
redis.call('ZADD', pinned, 'XX', integer(now), key)
if use == 'hit' then
  redis.call('HINCRBY', stats, 'requests', 1)
  redis.call('HINCRBY', stats, 'hits', 1)
  redis.call('HINCRBYFLOAT', stats, 'seconds_saved', seconds_saved(seconds))
else
  redis.call('HINCRBY', stats, 'fetches', 1)
end
redis.call('HINCRBY', stats, 'bytes_served', size)
return {digest, size, place, blob}
