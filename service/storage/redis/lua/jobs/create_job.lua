-- Create a job, or write it again after Redis came back without it. The oldest jobs that have ended make room, of which
-- there are too many, or which hold too much with this one: `bytes` of each, as it was created and as its items ended.
-- KEYS: jobs, open, job, audit, open_jobs.
-- ARGV: id, kind ('tune' or 'train'), wake channel, created ms, most jobs, most open ones, most bytes of all, name and
--       data of its first event or '', most audit entries, then of each hash entry: suffix of the hash's key, field, value.
-- Returns {'new', ids of those that made room}, {'exists'}, {'many', how many are open} or {'large', bytes of the open
-- ones}.
local jobs, open, job, audit, open_jobs = unpack(KEYS)
check_arguments(10, 3, 0)
local created, most_jobs, most_open = finite(ARGV[4]), whole(ARGV[5], 0), whole(ARGV[6], 0)
local most_bytes, most_audited = whole(ARGV[7], 0), whole(ARGV[10], 0)
local events, bytes = ARGV[2] == 'train' and 0, 0
for at = 11, #ARGV, 3 do
  bytes = bytes + #ARGV[at + 2]
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
local prefix = string.sub(job, 1, #job - #ARGV[1])
local sizes, open_bytes, all_bytes = {}, 0, bytes
for _, id in ipairs(redis.call('ZRANGE', jobs, 0, -1)) do
  sizes[id] = number_or(0, redis.call('HGET', prefix .. id, 'bytes'))
  all_bytes = all_bytes + sizes[id]
  open_bytes = open_bytes + (redis.call('ZSCORE', open, id) and sizes[id] or 0)
end
if open_bytes + bytes > most_bytes then
  return {'large', integer(open_bytes)}
end
if ARGV[9] ~= '' then
  add_job_event(job, ARGV[8], ARGV[9], events)
end
for at = 11, #ARGV, 3 do
  redis.call('HSET', job .. ARGV[at], ARGV[at + 1], ARGV[at + 2])
end
redis.call('HSET', job, 'bytes', integer(bytes))
redis.call('ZADD', jobs, created, ARGV[1])
redis.call('ZADD', open, created, ARGV[1])
redis.call('ZADD', open_jobs, integer(now), job)
if ARGV[9] ~= '' and events then
  redis.call('HSET', job, 'events', integer(events + 1))
end
redis.call('PUBLISH', ARGV[3], ARGV[2] .. ':' .. ARGV[1])
local answer, surplus = {'new'}, redis.call('ZCARD', jobs) - most_jobs
for _, id in ipairs(redis.call('ZRANGE', jobs, 0, -1)) do
  if (surplus > 0 or all_bytes > most_bytes) and not redis.call('ZSCORE', open, id) then
    local old = prefix .. id
    redis.call('DEL', old, old .. ':lease', old .. ':events', old .. ':items', old .. ':bodies', old .. ':progress',
      old .. ':results', old .. ':metrics', old .. ':logs', old .. ':history', old .. ':files', old .. ':shelves')
    redis.call('ZREM', jobs, id)
    redis.call('XADD', audit, 'MAXLEN', '~', most_audited, '*', 'action', ARGV[2] .. '_forgotten', 'name', 'service',
      'detail', id)
    answer[#answer + 1] = id
    surplus, all_bytes = surplus - 1, all_bytes - sizes[id]
  end
end
return answer
