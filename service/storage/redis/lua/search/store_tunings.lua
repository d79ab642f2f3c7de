-- Keep entries of the tuning database: the first for its problem and place stands. Those not used for longest make room.
-- KEYS: tunings, tuned. ARGV: most entries, 'replace' or '', then field and entry of each ...
-- Returns for each {'new', ''}, {'replaced', ''} or {'exists', the entry that stands}.
local time = redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
local out = {}
for position = 3, #ARGV, 2 do
  local field, entry = ARGV[position], ARGV[position + 1]
  local standing = redis.call('HGET', KEYS[1], field)
  if standing and (ARGV[2] ~= 'replace' or standing == entry) then
    out[#out + 1] = {'exists', standing}
  else
    redis.call('HSET', KEYS[1], field, entry)
    out[#out + 1] = {standing and 'replaced' or 'new', ''}
  end
  redis.call('ZADD', KEYS[2], now, field)
end
while redis.call('ZCARD', KEYS[2]) > tonumber(ARGV[1]) do
  redis.call('HDEL', KEYS[1], redis.call('ZPOPMIN', KEYS[2])[1])
end
return out
