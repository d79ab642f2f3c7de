-- Count some of a namespace's entries, and mend what contradicts their index: it says what there is.
-- KEYS: lru, pinned, sizes. ARGV: prefix of the index; keys of entries.
-- Returns {how many were mended, their bytes, those in Redis}.
local lru, pinned, sizes = unpack(KEYS)
local mended, bytes, inline = 0, 0, 0
for i = 2, #ARGV do
  local key, index = ARGV[i], ARGV[1] .. ARGV[i]
  local size, tier, created = unpack(redis.call('HMGET', index, 'size', 'place', 'created'))
  size = number_or(nil, size)
  if not size or not tier then
    local listed = redis.call('HDEL', sizes, key) + redis.call('ZREM', lru, key) + redis.call('ZREM', pinned, key)
    redis.call('DEL', index)
    mended = mended + math.min(listed, 1)
  else
    local used = redis.call('ZSCORE', lru, key) or redis.call('ZSCORE', pinned, key)
    if tonumber(redis.call('HGET', sizes, key) or '') ~= size or not used then
      redis.call('HSET', sizes, key, integer(size))
      if not used then
        redis.call('ZADD', lru, number_or(integer(now), created), key)
      end
      mended = mended + 1
    end
    bytes = bytes + size
    inline = inline + (tier == 'redis' and size or 0)
  end
end
return {mended, integer(bytes), integer(inline)}
