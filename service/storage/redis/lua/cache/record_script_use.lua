-- Store which keys a script used, in order of use, the latest run's last, and which of its inputs' sizes vary. The oldest
-- keys, sizes and scripts make room.
-- ARGV: the used keys come last, after the sizes that vary and those that do not.
local used, scripts, sizes = unpack(KEYS)
local script, ttl_ms, most_keys, most_sizes, most_scripts, prefix, sizes_prefix, varied, constant = unpack(ARGV)
check_arguments(9)
ttl_ms, most_keys, most_scripts = whole(ttl_ms, 1), whole(most_keys, 0), whole(most_scripts, 0)
most_sizes, varied, constant = whole(most_sizes, 0), whole(varied, 0), whole(constant, 0)
for position = 10, #ARGV do
  if position < 10 + varied then
    redis.call('ZADD', sizes, integer(now), ARGV[position])
  elseif position < 10 + varied + constant then
    redis.call('ZREM', sizes, ARGV[position])
  else
    redis.call('ZADD', used, integer(now * 1000 + position), ARGV[position])
  end
end
redis.call('ZREMRANGEBYRANK', used, 0, -1 - most_keys)
redis.call('ZREMRANGEBYRANK', sizes, 0, -1 - most_sizes)
redis.call('PEXPIRE', used, ttl_ms)
redis.call('PEXPIRE', sizes, ttl_ms)
redis.call('ZADD', scripts, integer(now), script)
redis.call('PEXPIRE', scripts, ttl_ms)
forget_oldest(scripts, most_scripts, prefix, sizes_prefix)
return 1
