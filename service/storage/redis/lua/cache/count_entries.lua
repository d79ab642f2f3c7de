-- Count some of a namespace's entries, and mend what contradicts their index: it says what there is. Counting again
-- takes many calls, between which entries come and go: publish.lua and drop_entry keep the new sums right.
-- KEYS: lru, pinned, sizes, total, inline, recount. ARGV: the count's id; prefix of the index; keys of entries.
-- Returns how many were mended, or nil if another count has begun since.
local lru, pinned, sizes, total, inline, recount = unpack(KEYS)
local id, index_prefix = unpack(ARGV)
if redis.call('HGET', recount, 'id') ~= id then
  return false
end
check_counters(redis.call('HMGET', recount, total, inline))
redis.call('HINCRBY', recount, total, 0)
local mended = 0
for i = 3, #ARGV do
  local key, index = ARGV[i], index_prefix .. ARGV[i]
  local size, place, counted, created = unpack(redis.call('HMGET', index, 'size', 'place', 'counted', 'created'))
  size = number_or(nil, size)
  local held = tonumber(redis.call('HGET', sizes, key) or '')
  if not size or not place then
    local listed = redis.call('HDEL', sizes, key) + redis.call('ZREM', lru, key) + redis.call('ZREM', pinned, key)
    redis.call('DEL', index)
    mended = mended + math.min(listed, 1)
  else
    local used = redis.call('ZSCORE', lru, key) or redis.call('ZSCORE', pinned, key)
    if held ~= size or not used then
      redis.call('HSET', sizes, key, integer(size))
      if not used then
        redis.call('ZADD', lru, number_or(integer(now), created), key)
      end
      mended = mended + 1
    end
    if counted ~= id then
      redis.call('HSET', index, 'counted', id)
      add_counted(size, place, total, inline, recount)
    end
  end
end
return mended
