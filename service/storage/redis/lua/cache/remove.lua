-- Take an entry out of the index, pinned or not, and its blob out of Redis; the caller deletes one in the store.
-- KEYS: index, lru, pinned, sizes, total, inline, audit.
-- ARGV: key, prefix of blobs, most audit entries, fields of the audit entry ...
-- Returns nil, or {digest, place}.
local entry = redis.call('HMGET', KEYS[1], 'digest', 'place', 'size')
if not entry[1] then
  return false
end
redis.call('DEL', KEYS[1])
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('ZREM', KEYS[3], ARGV[1])
redis.call('DECRBY', KEYS[5], redis.call('HGET', KEYS[4], ARGV[1]) or 0)
redis.call('HDEL', KEYS[4], ARGV[1])
if entry[2] == 'redis' then
  redis.call('DECRBY', KEYS[6], entry[3])
  redis.call('DEL', ARGV[2] .. entry[1])
end
local event = {unpack(ARGV, 4)}
event[#event + 1] = 'digest'
event[#event + 1] = entry[1]
redis.call('XADD', KEYS[7], 'MAXLEN', '~', ARGV[3], '*', unpack(event))
return {entry[1], entry[2]}
