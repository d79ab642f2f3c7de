-- Store entries of the tuning database: the first for its problem and device environment stands. The least recently
-- used make room.
-- ARGV: most entries, 'replace' or '', then field and entry of each ...
-- Returns for each {'new', ''}, {'replaced', ''} or {'exists', the entry that stands}.
local tunings, tuned = unpack(KEYS)
check_arguments(2, 2, 0)
local most = whole(ARGV[1], 0)
local out = {}
for position = 3, #ARGV, 2 do
  local field, entry = ARGV[position], ARGV[position + 1]
  local standing = redis.call('HGET', tunings, field)
  if standing and (ARGV[2] ~= 'replace' or standing == entry) then
    out[#out + 1] = {'exists', standing}
  else
    redis.call('HSET', tunings, field, entry)
    out[#out + 1] = {standing and 'replaced' or 'new', ''}
  end
  redis.call('ZADD', tuned, integer(now), field)
end
while redis.call('ZCARD', tuned) > most do
  redis.call('HDEL', tunings, redis.call('ZPOPMIN', tuned)[1])
end
return out
