-- What is known of problems in a place; it counts as used now.
-- KEYS: tunings, tuned. ARGV: fields ... Returns an entry or nil for each.
local time = redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
local out = {}
for position, field in ipairs(ARGV) do
  out[position] = redis.call('HGET', KEYS[1], field)
  if out[position] then
    redis.call('ZADD', KEYS[2], now, field)
  end
end
return out
