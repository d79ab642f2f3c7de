-- A process of a release begins to use Redis: writes what it speaks, unless it or what wrote Redis is too old.
-- KEYS: installation. ARGV: the release's number, the lowest that it works with, the wake channel, what it says once
-- that lowest number has risen.
-- Returns the number and the lowest that were there before; 1 for none.
local found = redis.call('HMGET', KEYS[1], 'protocol', 'oldest')
check_arguments(4)
local number, oldest = finite(found[1] or '1'), finite(found[2] or '1')
local own, own_oldest = finite(ARGV[1]), finite(ARGV[2])
if number >= own_oldest and own >= oldest then
  redis.call('HSET', KEYS[1], 'protocol', math.max(number, own), 'oldest', math.max(oldest, own_oldest))
  if own_oldest > oldest then
    redis.call('PUBLISH', ARGV[3], ARGV[4])
  end
end
return {number, oldest}
