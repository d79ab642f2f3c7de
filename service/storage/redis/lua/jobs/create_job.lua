-- Create a job, or write it again after Redis came back without it. The oldest jobs that have ended make room.
-- KEYS: jobs, open, job, audit, open_jobs.
-- ARGV: id, kind ('tune' or 'train'), wake channel, created ms, most jobs, most open ones, name and data of its first
--       event or '', most audit entries, then of each hash entry: suffix of the hash's key, field, value.
-- Returns {'new', ids of those that made room}, {'exists'} or {'many', how many are open}.
local jobs, open, job, audit, open_jobs = unpack(KEYS)
check_arguments(9, 3, 0)
local created, most_jobs, most_open = finite(ARGV[4]), whole(ARGV[5], 0), whole(ARGV[6], 0)
local most_audited = whole(ARGV[9], 0)
local events = ARGV[2] == 'train' and 0
for at = 10, #ARGV, 3 do
  if events and ARGV[at] == '' and ARGV[at + 1] == 'events' then
    events = whole(finite(ARGV[at + 2]), 0)
  end
end
if redis.call('EXISTS', job) == 1 then
  return {'exists'}
end
if redis.call('ZCARD', open) >= most_open then
  return {'many', redis.call('ZCARD', open)}
end
if ARGV[8] ~= '' then
  add_job_event(job, ARGV[7], ARGV[8], events)
end
for at = 10, #ARGV, 3 do
  redis.call('HSET', job .. ARGV[at], ARGV[at + 1], ARGV[at + 2])
end
redis.call('ZADD', jobs, created, ARGV[1])
redis.call('ZADD', open, created, ARGV[1])
redis.call('ZADD', open_jobs, integer(now), job)
if ARGV[8] ~= '' and events then
  redis.call('HSET', job, 'events', integer(events + 1))
end
redis.call('PUBLISH', ARGV[3], ARGV[2] .. ':' .. ARGV[1])
local answer = {'new'}
local surplus = redis.call('ZCARD', jobs) - most_jobs
if surplus > 0 then
  local prefix = string.sub(job, 1, #job - #ARGV[1])
  for _, id in ipairs(redis.call('ZRANGE', jobs, 0, -1)) do
    if surplus > 0 and not redis.call('ZSCORE', open, id) then
      local old = prefix .. id
      redis.call('DEL', old, old .. ':lease', old .. ':events', old .. ':items', old .. ':bodies', old .. ':progress',
        old .. ':results', old .. ':metrics', old .. ':logs', old .. ':history', old .. ':files', old .. ':shelves')
      redis.call('ZREM', jobs, id)
      redis.call('XADD', audit, 'MAXLEN', '~', most_audited, '*', 'action', ARGV[2] .. '_forgotten', 'name', 'service',
        'detail', id)
      answer[#answer + 1] = id
      surplus = surplus - 1
    end
  end
end
return answer
