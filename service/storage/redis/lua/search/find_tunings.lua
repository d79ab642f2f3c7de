-- The entries of some problems in a device environment; they count as used now.
-- ARGV: fields of tunings. Returns an entry or nil for each.
local tunings, tuned = unpack(KEYS)
local out = {}
for position, field in ipairs(ARGV) do
  out[position] = redis.call('HGET', tunings, field)
  if out[position] then
    redis.call('ZADD', tuned, integer(now), field)
  end
end
return out
