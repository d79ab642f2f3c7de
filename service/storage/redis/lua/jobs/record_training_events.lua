-- Record events of a training job, as the holder of its lease; once, however often the call is repeated.
-- KEYS: job, lease, events, metrics, logs, history.
-- ARGV: id, owner:fence, how many calls recorded events before, wake channel, most events, most bytes of them, how many
--       fields of the job follow and each one's name and value, then of each event its name, its data, its series
--       ('metrics', 'logs' or 'history') and its data there.
-- Returns 'recorded' or 'lost' (another holds the lease, or the job has ended).
check_arguments(7)
local tellings, most_events, fields_end = whole(ARGV[3], 0), whole(ARGV[5], 0), 7 + 2 * whole(ARGV[7], 0)
local most_bytes = whole(ARGV[6], 0)
check_arguments(fields_end, 4, 0)
local series = { metrics = KEYS[4], logs = KEYS[5], history = KEYS[6] }
for at = fields_end + 1, #ARGV, 4 do
  if not series[ARGV[at + 2]] then
    error('no series: ' .. ARGV[at + 2])
  end
end
local state = redis.call('HGET', KEYS[1], 'state')
if redis.call('GET', KEYS[2]) ~= ARGV[2] or state == 'done' or state == 'failed' or state == 'cancelled' then
  return 'lost'
end
local found = tonumber(redis.call('HGET', KEYS[1], 'tellings'))
if found == tellings + 1 then
  return 'recorded'
end
if found ~= tellings then
  return 'lost'
end
local events = whole(finite(redis.call('HGET', KEYS[1], 'events') or 0), 0)
-- the older half of the bytes goes when the newer one is full
local newer, newer_bytes = unpack(redis.call('HMGET', KEYS[1], 'newer', 'newer_bytes'))
newer, newer_bytes = number_or(0, newer), number_or(0, newer_bytes)
for at = fields_end + 1, #ARGV, 4 do -- first: Redis refuses a number that is not above those of the stream
  events = events + 1
  local number = integer(events) .. '-0'
  redis.call('XADD', KEYS[3], 'MAXLEN', '~', most_events, number, 'event', ARGV[at], 'data', ARGV[at + 1])
  newer_bytes = newer_bytes + #ARGV[at + 1]
  if newer_bytes > most_bytes / 2 then
    redis.call('XTRIM', KEYS[3], 'MINID', integer(newer))
    newer, newer_bytes = events, #ARGV[at + 1]
  end
  redis.call('XADD', series[ARGV[at + 2]], number, 'data', ARGV[at + 3])
end
for at = 8, fields_end, 2 do
  redis.call('HSET', KEYS[1], ARGV[at], ARGV[at + 1])
end
redis.call('HSET', KEYS[1], 'tellings', integer(tellings + 1), 'events', integer(events), 'newer', integer(newer),
  'newer_bytes', integer(newer_bytes))
redis.call('PUBLISH', ARGV[4], 'train:' .. ARGV[1])
return 'recorded'
