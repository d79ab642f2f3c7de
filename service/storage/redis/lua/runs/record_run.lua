-- Store what one process tells of a run; the oldest runs make room. Processes of one launch that end about the same time
-- are one run. Returns the run's id.
-- KEYS: as named; stats. ARGV: as named; then figures of the hour, each of which the first process of a run adds one to.
local runs, sizes, bytes, launch, stats = unpack(KEYS)
local id, rank, record, summary, records, summaries, launched, launch_ms, ttl_ms, most, most_bytes, most_of_run =
  unpack(ARGV)
check_arguments(12, 1, 0)
local own = id
launch_ms, ttl_ms, most = whole(launch_ms, 1), whole(ttl_ms, 1), whole(most, 1)
most_bytes, most_of_run = whole(most_bytes, 0), whole(most_of_run, 0)
if launched == '1' then
  local begun = redis.call('GET', launch)
  if begun and redis.call('EXISTS', summaries .. begun) == 1 and redis.call('HEXISTS', summaries .. begun, rank) == 0 then
    id = begun
  end
  redis.call('SET', launch, id, 'PX', launch_ms)
end
local size = number_or(0, redis.call('HGET', sizes, id))
local total = number_or(0, redis.call('GET', bytes))
local added = #record + #summary
redis.call('HSETNX', summaries .. id, 'first', summary)
if size + added <= most_of_run then
  redis.call('HSET', records .. id, rank, record)
  redis.call('HSET', summaries .. id, rank, summary)
  size, total = size + added, total + added
end
redis.call('HSET', sizes, id, integer(size))
for position = 13, id == own and #ARGV or 0 do
  count_hour(stats, ARGV[position], 1)
end
redis.call('ZADD', runs, integer(now), id)
local oldest = redis.call('ZRANGE', runs, 0, 0, 'WITHSCORES')
while oldest[1] ~= id
  and (redis.call('ZCARD', runs) > most or total > most_bytes or number_or(0, oldest[2]) < now - ttl_ms) do
  total = total - number_or(0, redis.call('HGET', sizes, oldest[1]))
  redis.call('ZREM', runs, oldest[1])
  redis.call('HDEL', sizes, oldest[1])
  redis.call('DEL', records .. oldest[1], summaries .. oldest[1])
  oldest = redis.call('ZRANGE', runs, 0, 0, 'WITHSCORES')
end
redis.call('SET', bytes, integer(math.max(total, 0)))
return id
