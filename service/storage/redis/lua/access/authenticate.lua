-- A token's record, and whether it may ask once more now: a bucket that fills evenly (GCRA), in the round trip
-- that reads the record.
-- KEYS: tokens, bucket.
-- ARGV: digest of the token, requests a second of a token that says nothing else (0: no limit),
--       how many seconds' worth of requests may come at once, prefix, default namespace.
-- Returns nil, or {record, milliseconds to wait}: 0 lets it pass.
local data = redis.call('HGET', KEYS[1], ARGV[1])
if not data then
  return false
end
local record = cjson.decode(data)
local rate = tonumber(ARGV[2])
if type(record.rate) == 'number' then
  rate = record.rate
end
if rate <= 0 then
  return {data, 0}
end
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local each = 1000000 / rate
local most = math.max(tonumber(ARGV[3]) * 1000000, each)
local full = tonumber(redis.call('GET', KEYS[2]) or '0') -- when the bucket is full again
local ahead = math.max(full - now, 0) + each
if ahead > most then
  local namespace = record.namespace
  local prefix = ARGV[4]
  if namespace and namespace ~= '*' and namespace ~= ARGV[5] then
    prefix = prefix .. 'ns:' .. namespace .. ':'
  end
  redis.call('HINCRBY', prefix .. 'stats', 'rate_limited', 1)
  return {data, math.ceil((ahead - most) / 1000)}
end
redis.call('SET', KEYS[2], string.format('%.0f', now + ahead), 'PX', math.ceil(ahead / 1000) + 1)
return {data, 0}
