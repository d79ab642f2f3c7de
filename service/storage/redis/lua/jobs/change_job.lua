-- End, cancel or resume a job.
-- KEYS: jobs, open, job, open_jobs.
-- ARGV: id, kind ('tune' or 'train'), wake channel, 'end', 'cancel' (the lease's holder then ends it) or 'resume',
--       its lease, owner:fence, or '' (no lease is needed), new state, name and data of the event, most open ones,
--       how many events of a job that has ended stay, then field and value of what is set with it.
-- Returns {'changed'}, {'unchanged'} (the job is not in a state for it), {'gone'} (there is no such job) or
-- {'many', how many are open}.
local jobs, open, job, open_jobs = unpack(KEYS)
check_arguments(10, 2, 0)
local training, transition = ARGV[2] == 'train', ARGV[4]
local most_open, most_events = whole(ARGV[9], 0), whole(ARGV[10], 0)
local state = redis.call('HGET', job, 'state')
if not state then
  return {'gone'}
end
local ended = state == 'done' or state == 'failed' or state == 'cancelled'
local possible
if transition == 'end' then
  possible = not ended and (ARGV[5] == '' or redis.call('GET', job .. ':lease') == ARGV[5])
elseif transition == 'cancel' then
  possible = not ended and redis.call('HGET', job, 'wish') == ''
else
  possible = ended and not (training and state == 'done')
end
if not possible then
  return {'unchanged'}
end
if transition == 'resume' and redis.call('ZCARD', open) >= most_open then
  return {'many', redis.call('ZCARD', open)}
end
-- items that failed, were skipped or had only begun are searched again, with the whole budget
local again = {}
if transition == 'resume' and not training then
  local states = { failed = true, skipped = true, searching = true }
  local progress = redis.call('HGETALL', job .. ':progress')
  for i = 1, #progress, 2 do
    if states[cjson.decode(progress[i + 1]).state] then
      again[#again + 1] = progress[i]
    end
  end
end
-- items that are done do not run again, even if the job is resumed: their requests go
local over = {}
if transition == 'end' and not training then
  for _, item in ipairs(redis.call('HKEYS', job .. ':bodies')) do
    local progress = redis.call('HGET', job .. ':progress', item)
    local reached = progress and cjson.decode(progress).state
    if reached == 'done' or reached == 'known' then
      over[#over + 1] = item
    end
  end
end
local events
if transition ~= 'cancel' then
  check_counters(redis.call('HMGET', job, 'turn', 'resumes', 'bytes'))
  events = training and whole(finite(redis.call('HGET', job, 'events') or 0), 0)
  add_job_event(job, ARGV[7], ARGV[8], events)
end
for at = 11, #ARGV, 2 do
  redis.call('HSET', job, ARGV[at], ARGV[at + 1])
end
redis.call('PUBLISH', ARGV[3], ARGV[2] .. ':' .. ARGV[1])
if transition == 'cancel' then
  return {'changed'}
end
redis.call('HINCRBY', job, 'turn', 1)
if training then
  redis.call('HSET', job, 'events', integer(events + 1))
end
if transition == 'end' then
  redis.call('HSET', job, 'state', ARGV[6], 'ended', integer(now))
  redis.call('ZREM', open, ARGV[1])
  redis.call('ZREM', open_jobs, job)
  redis.call('DEL', job .. ':lease')
  for _, item in ipairs(over) do
    redis.call('HINCRBY', job, 'bytes', 0 - redis.call('HSTRLEN', job .. ':bodies', item))
    redis.call('HDEL', job .. ':bodies', item)
  end
else
  redis.call('HSET', job, 'state', ARGV[6], 'ended', 0)
  redis.call('ZADD', open, redis.call('ZSCORE', jobs, ARGV[1]) or integer(now), ARGV[1])
  redis.call('ZADD', open_jobs, integer(now), job)
  if training then
    redis.call('HINCRBY', job, 'resumes', 1)
  else
    for _, item in ipairs(again) do
      redis.call('HDEL', job .. ':progress', item)
    end
    redis.call('HDEL', job, 'n:failed', 'n:skipped')
    local spent = redis.call('HMGET', job, 'spent', 'trials')
    redis.call('HSET', job, 'base_spent', spent[1] or 0, 'base_trials', spent[2] or 0)
  end
end
if training and transition == 'end' then
  redis.call('XTRIM', job .. ':events', 'MAXLEN', '~', most_events)
end
return {'changed'}
