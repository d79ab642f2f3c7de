-- End, cancel or resume a job.
-- KEYS: jobs, open, job, open_jobs.
-- ARGV: id, kind ('tune' or 'train'), wake channel, 'end', 'cancel' (the lease's holder then ends it) or 'resume',
--       its lease, owner:fence, or '' (no lease is needed), new state, most open ones, how many events of a job that has
--       ended stay, name, data, series and data there of the event, then field and value of what is set with it.
-- Returns {'changed'}, {'unchanged'} (the job is not in a state for it), {'gone'} (there is no such job) or
-- {'many', how many are open}.
local jobs, open, job, open_jobs = unpack(KEYS)
check_arguments(12, 2, 0)
local id, kind, wake, transition, token, new_state = unpack(ARGV)
local most_open, most_events = whole(ARGV[7], 0), whole(ARGV[8], 0)
local state, events, cancelled_by = unpack(redis.call('HMGET', job, 'state', 'events', 'cancelled_by'))
if not state then
  return {'gone'}
end
local possible = has_ended(state) == (transition == 'resume')
if transition == 'end' and token ~= '' then
  possible = possible and redis.call('GET', job .. ':lease') == token
elseif transition == 'cancel' then
  possible = possible and cancelled_by == ''
end
if not possible then
  return {'unchanged'}
end
if transition == 'resume' and redis.call('ZCARD', open) >= most_open then
  return {'many', redis.call('ZCARD', open)}
end
if transition ~= 'cancel' then
  check_counters({redis.call('HGET', job, 'resumes')})
  events = whole(finite(events or 0), 0) + 1
  add_job_event(job, events, unpack(ARGV, 9, 12))
  redis.call('HSET', job, 'state', new_state, 'events', integer(events))
end
for at = 13, #ARGV, 2 do
  redis.call('HSET', job, ARGV[at], ARGV[at + 1])
end
if transition == 'end' then
  redis.call('HSET', job, 'ended', integer(now))
  redis.call('ZREM', open, id)
  redis.call('ZREM', open_jobs, job)
  redis.call('DEL', job .. ':lease')
  redis.call('XTRIM', job .. ':events', 'MAXLEN', '~', most_events)
elseif transition == 'resume' then
  redis.call('HSET', job, 'ended', 0)
  redis.call('HINCRBY', job, 'resumes', 1)
  redis.call('ZADD', open, redis.call('ZSCORE', jobs, id) or integer(now), id)
  redis.call('ZADD', open_jobs, integer(now), job)
end
redis.call('PUBLISH', wake, kind .. ':' .. id)
return {'changed'}
