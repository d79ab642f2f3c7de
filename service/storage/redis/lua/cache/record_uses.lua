-- Add to the counters what a process has counted of uses, and note when artifacts were used last.
-- KEYS: lru, pinned, stats, fallbacks. ARGV: how many counters; of each its name, `fallback:<code>` for one of fallbacks, and
-- what to add, maybe negative; then of each artifact its key, and how long ago it was used, ms.
local lru, pinned, stats, fallbacks = unpack(KEYS)
local counters = whole(ARGV[1], 0)
check_arguments(1 + 2 * counters, 2, 0)
local numbers, used = {}, {}
for position = 2, 2 * counters, 2 do
  local name, number = ARGV[position], finite(ARGV[position + 1])
  local stored = redis.call('HGET', name:match('^fallback:') and fallbacks or stats, (name:gsub('^fallback:', '')))
  if name:match('^seconds') then
    finite(stored or 0)
  else
    check_counters({stored, integer(number)})
  end
  numbers[name] = number
end
for position = 2 + 2 * counters, #ARGV, 2 do
  used[ARGV[position]] = integer(now - finite(ARGV[position + 1]))
end
for name, number in pairs(numbers) do
  local code = name:match('^fallback:(.*)')
  if code then
    redis.call('HINCRBY', fallbacks, code, integer(number))
    count_hour(stats, name, integer(number))
  else
    count(stats, name, number)
  end
end
for key, at in pairs(used) do
  redis.call('ZADD', lru, 'XX', 'GT', at, key) -- it is in one of the two
  redis.call('ZADD', pinned, 'XX', 'GT', at, key)
end
return 1
