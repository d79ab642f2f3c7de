-- Create a job, or write it again after Redis came back without it. The oldest jobs that have ended make room.
-- KEYS: jobs, open, job, audit, open_jobs.
-- ARGV: id, kind ('tune' or 'train'), wake channel, created ms, most jobs, most open ones, name and data of its first
--       event or '', most audit entries, then of each hash entry: suffix of the hash's key, field, value.
-- Returns {'new', ids of those that made room}, {'exists'} or {'many', how many are open}.
local jobs, open, job, audit, open_jobs = unpack(KEYS)
if redis.call('EXISTS', job) == 1 then
  return {'exists'}
end
if redis.call('ZCARD', open) >= tonumber(ARGV[6]) then
  return {'many', redis.call('ZCARD', open)}
end
for at = 10, #ARGV, 3 do
  redis.call('HSET', job .. ARGV[at], ARGV[at + 1], ARGV[at + 2])
end
redis.call('ZADD', jobs, ARGV[4], ARGV[1])
redis.call('ZADD', open, ARGV[4], ARGV[1])
redis.call('ZADD', open_jobs, integer(now), job)
if ARGV[8] ~= '' then
  local number = '*'
  if ARGV[2] == 'train' then
    number = redis.call('HINCRBY', job, 'events', 1) .. '-0'
    redis.call('XADD', job .. ':history', number, 'data', ARGV[8])
  end
  redis.call('XADD', job .. ':events', number, 'event', ARGV[7], 'data', ARGV[8])
end
redis.call('PUBLISH', ARGV[3], ARGV[2] .. ':' .. ARGV[1])
local answer = {'new'}
local surplus = redis.call('ZCARD', jobs) - tonumber(ARGV[5])
if surplus > 0 then
  local prefix = string.sub(job, 1, #job - #ARGV[1])
  for _, id in ipairs(redis.call('ZRANGE', jobs, 0, -1)) do
    if surplus > 0 and not redis.call('ZSCORE', open, id) then
      local old = prefix .. id
      redis.call('DEL', old, old .. ':lease', old .. ':events', old .. ':items', old .. ':bodies', old .. ':progress',
        old .. ':results', old .. ':metrics', old .. ':logs', old .. ':history', old .. ':files', old .. ':shelves')
      redis.call('ZREM', jobs, id)
      redis.call('XADD', audit, 'MAXLEN', '~', ARGV[9], '*', 'action', ARGV[2] .. '_forgotten', 'name', 'service',
        'detail', id)
      answer[#answer + 1] = id
      surplus = surplus - 1
    end
  end
end
return answer
