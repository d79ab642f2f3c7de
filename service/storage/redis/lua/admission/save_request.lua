-- Store the body of a request for tuning jobs that will name it by key; the oldest of all namespaces make room.
-- ARGV: body: '' takes that of the key's compile, which Redis has. Returns 1, or 0 if the compile is over.
local saved, sizes, total, request, compiled = unpack(KEYS)
local body, most_bytes = ARGV[1], comparable(ARGV[2])
check_arguments(2)
check_counters({redis.call('GET', total)})
if body == '' then
  body = redis.call('GET', compiled)
  if not body then
    return 0
  end
end

local function forget(name)
  redis.call('ZREM', saved, name)
  redis.call('DECRBY', total, integer(number_or(0, redis.call('HGET', sizes, name))))
  redis.call('HDEL', sizes, name)
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
redis.call('ZADD', saved, integer(microseconds), request) -- a millisecond has several
redis.call('HSET', sizes, request, #body)
redis.call('INCRBY', total, #body)
return 1
