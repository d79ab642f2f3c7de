-- Store what an artifact's key was made of. The oldest of all namespaces make room, some in each call.
-- KEYS: components, described, described_bytes. ARGV: the components; most bytes together.
local components, described, bytes = unpack(KEYS)
local data, most = ARGV[1], comparable(ARGV[2])
local held = redis.call('INCRBY', bytes, #data) -- first: it fails where there is no number
redis.call('SET', components, data)
redis.call('RPUSH', described, #data .. ':' .. components)
for _ = 1, 20 do
  local oldest = held > most and redis.call('LPOP', described)
  if not oldest then
    break
  end
  local size, name = oldest:match('^(%d+):(.*)$')
  redis.call('DEL', name)
  held = redis.call('DECRBY', bytes, size)
end
return 1
