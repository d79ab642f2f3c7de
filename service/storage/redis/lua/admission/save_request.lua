-- Keep the body of a request for batch jobs that will name it by key; those kept longest ago make room.
-- KEYS: kept, sizes, total, body. ARGV: key, body, most bytes of all, prefix of bodies.
local time = redis.call('TIME')
redis.call('ZADD', KEYS[1], string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000)), ARGV[1])
redis.call('SET', KEYS[4], ARGV[2])
redis.call('INCRBY', KEYS[3], #ARGV[2] - tonumber(redis.call('HGET', KEYS[2], ARGV[1]) or '0'))
redis.call('HSET', KEYS[2], ARGV[1], #ARGV[2])
while tonumber(redis.call('GET', KEYS[3])) > tonumber(ARGV[3]) and redis.call('ZCARD', KEYS[1]) > 1 do
  local oldest = redis.call('ZPOPMIN', KEYS[1])[1]
  redis.call('DECRBY', KEYS[3], redis.call('HGET', KEYS[2], oldest) or 0)
  redis.call('HDEL', KEYS[2], oldest)
  redis.call('DEL', ARGV[4] .. oldest)
end
return 1
