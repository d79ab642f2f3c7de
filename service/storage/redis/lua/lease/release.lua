-- Give a lease back unfinished (the gateway stops); whoever waits takes the compile over at once.
-- KEYS: lease, active. ARGV: key, owner:fence, wake channel. Returns 1 or 0.
if redis.call('GET', KEYS[1]) ~= ARGV[2] then
  return 0
end
redis.call('DEL', KEYS[1])
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('PUBLISH', ARGV[3], ARGV[1])
return 1
