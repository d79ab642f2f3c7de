-- Record how far a job is, as the holder of its lease: fields of its hashes, and events. Once, however often the call is
-- repeated: without events, a second time changes nothing.
-- KEYS: job, lease.
-- ARGV: id, kind, owner:fence, how many events there were before, wake channel, most events, most bytes of them, how
--       many fields follow and of each: suffix of its hash's key, name, value (but for the job's own hash, '' deletes);
--       then of each event: name, data, its series or '', its data there.
-- Returns 'recorded' or 'lost' (another holds the lease, or has recorded events, or the job has ended).
local job, lease = unpack(KEYS)
check_arguments(8)
local id, kind, token, before, wake = unpack(ARGV)
local most_events, most_bytes = whole(ARGV[6], 0), whole(ARGV[7], 0)
local fields_end = 8 + 3 * whole(ARGV[8], 0)
check_arguments(fields_end, 4, 0)
before = whole(finite(before), 0)
local state, events, newer, newer_bytes, bytes =
  unpack(redis.call('HMGET', job, 'state', 'events', 'newer', 'newer_bytes', 'bytes'))
if redis.call('GET', lease) ~= token or has_ended(state) then
  return 'lost'
end
events = whole(finite(events or 0), 0)
if #ARGV > fields_end and events == before + (#ARGV - fields_end) / 4 then
  return 'recorded'
end
if events ~= before then
  return 'lost'
end
check_counters({bytes})
-- the older half of the bytes goes when the newer one is full
newer, newer_bytes = number_or(0, newer), number_or(0, newer_bytes)
for at = fields_end + 1, #ARGV, 4 do
  events = events + 1
  add_job_event(job, events, unpack(ARGV, at, at + 3))
  newer_bytes = newer_bytes + #ARGV[at + 1]
  if newer_bytes > most_bytes / 2 then
    redis.call('XTRIM', job .. ':events', 'MINID', integer(newer))
    newer, newer_bytes = events, #ARGV[at + 1]
  end
end
redis.call('XTRIM', job .. ':events', 'MAXLEN', '~', most_events)
local added = 0
for at = 9, fields_end, 3 do
  local hash, name, value = job .. ARGV[at], ARGV[at + 1], ARGV[at + 2]
  added = added + #value - redis.call('HSTRLEN', hash, name)
  if value == '' and ARGV[at] ~= '' then
    redis.call('HDEL', hash, name)
  else
    redis.call('HSET', hash, name, value)
  end
end
redis.call('HINCRBY', job, 'bytes', integer(added))
redis.call('HSET', job, 'events', integer(events), 'newer', integer(newer), 'newer_bytes', integer(newer_bytes))
redis.call('PUBLISH', wake, kind .. ':' .. id)
return 'recorded'
