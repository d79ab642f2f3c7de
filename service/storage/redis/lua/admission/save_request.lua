-- Store the body of a request for tuning jobs that will name it by key; the oldest of all namespaces make room.
-- KEYS: the last three are what earlier versions had in each namespace.
-- ARGV: body: '' takes that of the key's compile, which Redis has. Returns 1, or 0 if the compile is over.
local saved, sizes, total, request, compiled, kept, kept_sizes, kept_total = unpack(KEYS)
local body, most_bytes, prefix = ARGV[1], comparable(ARGV[2]), ARGV[3]
check_arguments(3)
check_counters({redis.call('GET', total)})
if body == '' then
  body = redis.call('GET', compiled)
  if not body then
    return 0
  end
end

local function count(name, bytes, at)
  redis.call('ZADD', saved, at, name)
  redis.call('HSET', sizes, name, bytes)
  redis.call('INCRBY', total, bytes)
end

local function forget(name)
  redis.call('ZREM', saved, name)
  redis.call('DECRBY', total, integer(number_or(0, redis.call('HGET', sizes, name))))
  redis.call('HDEL', sizes, name)
end

local earlier = redis.call('ZPOPMIN', kept, 20)
for i = 1, #earlier, 2 do
  local name = prefix .. earlier[i]
  forget(name)
  count(name, integer(number_or(0, redis.call('HGET', kept_sizes, earlier[i]))), earlier[i + 1])
end
if #earlier > 0 and redis.call('EXISTS', kept) == 0 then
  redis.call('DEL', kept_sizes, kept_total)
end
forget(request)
while tonumber(redis.call('GET', total)) + #body > most_bytes do
  local oldest = redis.call('ZRANGE', saved, 0, 0)[1]
  if not oldest then
    break
  end
  forget(oldest)
  redis.call('DEL', oldest)
end
redis.call('SET', request, body)
count(request, #body, integer(now))
return 1
