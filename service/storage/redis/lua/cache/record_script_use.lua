-- Store which keys a script used, in order of use, the latest run's last. The oldest keys and scripts make room.
-- ARGV: the used keys come last.
local used, scripts = unpack(KEYS)
local script, ttl_ms, most_keys, most_scripts, prefix = unpack(ARGV)
check_arguments(5)
ttl_ms, most_keys, most_scripts = whole(ttl_ms, 1), whole(most_keys, 0), whole(most_scripts, 0)
for position = 6, #ARGV do
  redis.call('ZADD', used, integer(now * 1000 + position), ARGV[position])
end
redis.call('ZREMRANGEBYRANK', used, 0, -1 - most_keys)
redis.call('PEXPIRE', used, ttl_ms)
redis.call('ZADD', scripts, integer(now), script)
redis.call('PEXPIRE', scripts, ttl_ms)
forget_oldest(scripts, most_scripts, prefix)
return 1
