-- Keep what a request that missed was made of, and under which graph to find it; the oldest make room.
-- KEYS: asked, asks, graphs, alike.
-- ARGV: key, graph digest, packed components, ttl ms, most asks, most graphs, most keys of one graph,
--       prefix of asked, prefix of alike.
local time = redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
redis.call('SET', KEYS[1], ARGV[3], 'PX', ARGV[4])
redis.call('ZADD', KEYS[2], now, ARGV[1])
redis.call('ZADD', KEYS[3], now, ARGV[2])
redis.call('ZADD', KEYS[4], now, ARGV[1])
redis.call('ZREMRANGEBYRANK', KEYS[4], 0, -1 - tonumber(ARGV[7]))
while redis.call('ZCARD', KEYS[2]) > tonumber(ARGV[5]) do
  redis.call('DEL', ARGV[8] .. redis.call('ZPOPMIN', KEYS[2])[1])
end
while redis.call('ZCARD', KEYS[3]) > tonumber(ARGV[6]) do
  redis.call('DEL', ARGV[9] .. redis.call('ZPOPMIN', KEYS[3])[1])
end
return 1
