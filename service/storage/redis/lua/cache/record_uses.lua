-- Add to the counters what a process has counted of uses, and note when artifacts were used last.
-- KEYS: lru, pinned, stats. ARGV: what to add to each of `counted`, maybe negative, and to seconds_saved; then of each
-- artifact its key, and how long ago it was used, ms.
local lru, pinned, stats = unpack(KEYS)
check_arguments(6, 2, 0)
local counted = {'requests', 'hits', 'misses', 'fetches', 'bytes_served'}
local numbers = {}
for position, name in ipairs(counted) do
  numbers[name] = finite(ARGV[position])
end
local saved = string.format('%.6f', finite(ARGV[6]))
local used = {}
for position = 7, #ARGV, 2 do
  used[ARGV[position]] = integer(now - finite(ARGV[position + 1]))
end
check_counters(redis.call('HMGET', stats, unpack(counted)))
finite(redis.call('HGET', stats, 'seconds_saved') or 0)
for _, name in ipairs(counted) do
  if numbers[name] ~= 0 then
    redis.call('HINCRBY', stats, name, integer(numbers[name]))
  end
end
redis.call('HINCRBYFLOAT', stats, 'seconds_saved', saved)
for key, at in pairs(used) do
  redis.call('ZADD', lru, 'XX', 'GT', at, key) -- it is in one of the two
  redis.call('ZADD', pinned, 'XX', 'GT', at, key)
end
return 1
