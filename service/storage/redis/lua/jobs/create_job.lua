-- Create a job, or write it again after Redis came back without it. The oldest jobs that have ended make room, of which
-- there are too many, or which hold too much with this one: `bytes` of each.
-- KEYS: jobs, open, job, audit, open_jobs.
-- ARGV: id, kind ('tune' or 'train'), wake channel, created ms, most jobs, most open ones, most bytes of all, most audit
--       entries, how many events there were before; name, data, series and data there of its first event, or '' four
--       times; then of each hash entry: suffix of the hash's key, field, value.
-- Returns {'new', ids of those that made room}, {'exists'}, {'many', how many are open} or {'large', bytes of the open
-- ones}.
local jobs, open, job, audit, open_jobs = unpack(KEYS)
check_arguments(13, 3, 0)
local id, kind, wake, created = unpack(ARGV)
local most_jobs, most_open, most_bytes = whole(ARGV[5], 0), whole(ARGV[6], 0), whole(ARGV[7], 0)
local most_audited, events, bytes = whole(ARGV[8], 0), whole(finite(ARGV[9]), 0), 0
created = finite(created)
for at = 14, #ARGV, 3 do
  bytes = bytes + #ARGV[at + 2]
end
if redis.call('EXISTS', job) == 1 then
  return {'exists'}
end
if redis.call('ZCARD', open) >= most_open then
  return {'many', redis.call('ZCARD', open)}
end
local prefix = string.sub(job, 1, #job - #id)
local sizes, open_bytes, all_bytes = {}, 0, bytes
for _, other in ipairs(redis.call('ZRANGE', jobs, 0, -1)) do
  sizes[other] = number_or(0, redis.call('HGET', prefix .. other, 'bytes'))
  all_bytes = all_bytes + sizes[other]
  open_bytes = open_bytes + (redis.call('ZSCORE', open, other) and sizes[other] or 0)
end
if open_bytes + bytes > most_bytes then
  return {'large', integer(open_bytes)}
end
if ARGV[10] ~= '' then
  events = events + 1
  add_job_event(job, events, unpack(ARGV, 10, 13))
end
for at = 14, #ARGV, 3 do
  redis.call('HSET', job .. ARGV[at], ARGV[at + 1], ARGV[at + 2])
end
redis.call('HSET', job, 'bytes', integer(bytes), 'events', integer(events))
redis.call('ZADD', jobs, created, id)
redis.call('ZADD', open, created, id)
redis.call('ZADD', open_jobs, integer(now), job)
redis.call('PUBLISH', wake, kind .. ':' .. id)
local answer, surplus = {'new'}, redis.call('ZCARD', jobs) - most_jobs
for _, other in ipairs(redis.call('ZRANGE', jobs, 0, -1)) do
  if (surplus > 0 or all_bytes > most_bytes) and not redis.call('ZSCORE', open, other) then
    local old = prefix .. other
    redis.call('SET', old .. ':lease', 'forgotten', 'PX', 3600000) -- so that no run that goes on writes it again
    redis.call('DEL', old, old .. ':events', old .. ':items', old .. ':bodies', old .. ':progress',
      old .. ':results', old .. ':metrics', old .. ':logs', old .. ':history', old .. ':files', old .. ':segments')
    redis.call('ZREM', jobs, other)
    redis.call('XADD', audit, 'MAXLEN', '~', most_audited, '*', 'action', kind .. '_forgotten', 'name', 'service',
      'detail', other)
    answer[#answer + 1] = other
    surplus, all_bytes = surplus - 1, all_bytes - sizes[other]
  end
end
return answer
