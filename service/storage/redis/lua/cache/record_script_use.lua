-- Keep which keys a script used, in order of use, the latest run's last. The oldest keys and scripts make room.
-- KEYS: the script's keys, scripts. ARGV: script, ttl ms, most keys of a script, most scripts, prefix of scripts, keys ...
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for position = 6, #ARGV do
  redis.call('ZADD', KEYS[1], string.format('%.0f', now * 1000 + position), ARGV[position])
end
redis.call('ZREMRANGEBYRANK', KEYS[1], 0, -1 - tonumber(ARGV[3]))
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('ZADD', KEYS[2], string.format('%.0f', now), ARGV[1])
redis.call('PEXPIRE', KEYS[2], ARGV[2])
while redis.call('ZCARD', KEYS[2]) > tonumber(ARGV[4]) do
  redis.call('DEL', ARGV[5] .. redis.call('ZPOPMIN', KEYS[2])[1])
end
return 1
