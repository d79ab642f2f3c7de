-- Store the body of a request for tuning jobs that will name it by key; the oldest make room.
-- ARGV: body: '' takes that of the key's compile, which Redis has. Returns 1, or 0 if the compile is over.
local saved, sizes, total, request, compiled = unpack(KEYS)
local key, body, most_bytes, prefix = unpack(ARGV)
if body == '' then
  body = redis.call('GET', compiled)
  if not body then
    return 0
  end
end
redis.call('ZADD', saved, integer(now), key)
redis.call('SET', request, body)
redis.call('INCRBY', total, #body - tonumber(redis.call('HGET', sizes, key) or '0'))
redis.call('HSET', sizes, key, #body)
while tonumber(redis.call('GET', total)) > tonumber(most_bytes) and redis.call('ZCARD', saved) > 1 do
  local oldest = redis.call('ZPOPMIN', saved)[1]
  redis.call('DECRBY', total, redis.call('HGET', sizes, oldest) or 0)
  redis.call('HDEL', sizes, oldest)
  redis.call('DEL', prefix .. oldest)
end
return 1
