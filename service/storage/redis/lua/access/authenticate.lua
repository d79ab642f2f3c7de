-- A token's record, and whether it may ask once more now: a bucket that fills evenly (GCRA), in the round trip
-- that reads the record. While Redis refuses writes (pcall), nothing is counted, so that hits are answered then, too.
-- ARGV: requests a second of a token without a rate of its own (0: no limit); how many seconds' worth of requests may
--       come at once; the record, where it is not among the tokens but made of claims that another issuer signed: its
--       namespace exists from now on, unless it was deleted.
-- Returns nil, or {record, milliseconds to wait}: 0 lets it pass; -1: its namespace was deleted.
local tokens, bucket, namespaces, deleted = unpack(KEYS)
local digest, rate, burst_seconds, prefix, default, made = unpack(ARGV)
check_arguments(6)
rate, burst_seconds = comparable(rate), comparable(burst_seconds)
local data = made ~= '' and made or redis.call('HGET', tokens, digest)
if not data then
  -- A primary knows its tokens. One that was replaced, and has nothing yet, says READONLY: the caller looks for another.
  local answer = redis.pcall('DEL', bucket)
  return type(answer) == 'table' and string.find(answer.err, 'READONLY') and answer or false
end
local record = cjson.decode(data)
if type(record.rate) == 'number' then
  rate = record.rate
end
local full = rate > 0 and finite(redis.call('GET', bucket) or 0) -- when the bucket is full again
if made ~= '' and record.namespace and record.namespace ~= '*' and record.namespace ~= default then
  if redis.call('HEXISTS', deleted, record.namespace) == 1 then
    return {data, -1}
  end
  redis.pcall('HSETNX', namespaces, record.namespace, '{}')
end
if rate <= 0 then
  return {data, 0}
end
local each = 1000000 / rate
local most = math.max(burst_seconds * 1000000, each)
local ahead = math.max(full - microseconds, 0) + each
if ahead > most then
  local namespace = record.namespace
  if namespace and namespace ~= '*' and namespace ~= default then
    prefix = prefix .. 'ns:' .. namespace .. ':'
  end
  redis.pcall('HINCRBY', prefix .. 'stats', 'rate_limited', 1)
  count_hour(prefix .. 'stats', 'rate_limited', 1)
  return {data, math.ceil((ahead - most) / 1000)}
end
redis.pcall('SET', bucket, integer(microseconds + ahead), 'PX', math.ceil(ahead / 1000) + 1)
return {data, 0}
