-- A hit in one round trip: the index entry, the blob if Redis holds it, last use and counters.
-- KEYS: index, lru, stats, pinned. ARGV: key, prefix of blobs, 'hit' or 'fetch'.
-- Returns nil, or {digest, size, place, blob or nil}.
local entry = redis.call('HMGET', KEYS[1], 'digest', 'size', 'seconds', 'place')
if not entry[1] then
  return false
end
local blob = false
if entry[4] == 'redis' then
  blob = redis.call('GET', ARGV[2] .. entry[1])
end
local time = redis.call('TIME')
local used = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
redis.call('ZADD', KEYS[2], 'XX', used, ARGV[1]) -- it is in one of the two
redis.call('ZADD', KEYS[4], 'XX', used, ARGV[1])
if ARGV[3] == 'hit' then
  redis.call('HINCRBY', KEYS[3], 'requests', 1)
  redis.call('HINCRBY', KEYS[3], 'hits', 1)
  redis.call('HINCRBYFLOAT', KEYS[3], 'seconds_saved', entry[3])
else
  redis.call('HINCRBY', KEYS[3], 'fetches', 1)
end
redis.call('HINCRBY', KEYS[3], 'bytes_served', entry[2])
return {entry[1], entry[2], entry[4], blob}
