-- Give a lease back unfinished (the gateway stops); a gateway with a waiting client takes the compile over at once.
-- KEYS: Keys.compile_keys. ARGV: token: owner:fence. Returns 1 or 0.
local _, lease, _, active = unpack(KEYS)
local key, token, wake = unpack(ARGV)
if redis.call('GET', lease) ~= token then
  return 0
end
redis.call('DEL', lease)
redis.call('ZREM', active, key)
redis.call('PUBLISH', wake, key)
return 1
