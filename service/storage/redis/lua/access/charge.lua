-- Add to what a namespace has spent in its period, which begins with the first second spent.
-- In whole milliseconds: INCRBYFLOAT in a script corrupts the memory of Redis 6.2 (it grows the script's arguments).
local spent, stats = unpack(KEYS)
local seconds, period_ms = finite(ARGV[1]), whole(ARGV[2], 1)
finite(redis.call('HGET', stats, 'seconds_spent') or 0)
redis.call('INCRBY', spent, integer(seconds * 1000))
if redis.call('PTTL', spent) < 0 then
  redis.call('PEXPIRE', spent, period_ms)
end
count(stats, 'seconds_spent', seconds)
return 1
