-- Record events of a training job, as the holder of its lease; once, however often the call is repeated.
-- KEYS: job, lease, events, metrics, logs, history.
-- ARGV: id, owner, how many calls recorded events before, wake channel, most events, how many fields of the job follow
--       and each one's name and value, then of each event its name, its data, its series ('metrics', 'logs' or 'history')
--       and its data there.
-- Returns 'recorded' or 'lost' (another holds the lease, or the job has ended).
local state = redis.call('HGET', KEYS[1], 'state')
if redis.call('GET', KEYS[2]) ~= ARGV[2] or state == 'done' or state == 'failed' or state == 'cancelled' then
  return 'lost'
end
local tellings = tonumber(redis.call('HGET', KEYS[1], 'tellings'))
if tellings == tonumber(ARGV[3]) + 1 then
  return 'recorded'
end
if tellings ~= tonumber(ARGV[3]) then
  return 'lost'
end
redis.call('HINCRBY', KEYS[1], 'tellings', 1)
local first = 7 + 2 * tonumber(ARGV[6])
for at = 7, first - 1, 2 do
  redis.call('HSET', KEYS[1], ARGV[at], ARGV[at + 1])
end
local series = { metrics = KEYS[4], logs = KEYS[5], history = KEYS[6] }
for at = first, #ARGV, 4 do
  local number = redis.call('HINCRBY', KEYS[1], 'events', 1) .. '-0'
  redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[5], number, 'event', ARGV[at], 'data', ARGV[at + 1])
  redis.call('XADD', series[ARGV[at + 2]], number, 'data', ARGV[at + 3])
end
redis.call('PUBLISH', ARGV[4], 'train:' .. ARGV[1])
return 'recorded'
