-- Add to what a namespace has spent in its period, which begins with the first second spent.
-- KEYS: spent, stats. ARGV: seconds, period ms.
-- In whole milliseconds: INCRBYFLOAT in a script corrupts the memory of Redis 6.2 (it grows the script's arguments).
redis.call('INCRBY', KEYS[1], string.format('%.0f', ARGV[1] * 1000))
if redis.call('PTTL', KEYS[1]) < 0 then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
redis.call('HINCRBYFLOAT', KEYS[2], 'seconds_spent', ARGV[1])
return 1
