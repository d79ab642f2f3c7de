-- Take, renew or release the lease of a job. Only the holder of the lease runs the job.
-- KEYS: job, open_jobs. ARGV: id, kind ('tune' or 'train'), wake channel, owner, lease ms, 'take' or 'release', turn or ''.
-- Returns {'held', who cancelled the job, in words, or ''}, {'taken'} by another, {'ended'} (the job has ended, or had
-- and was resumed since this turn), {'gone'} (there is no such job) or {'released'}.
local job, open_jobs = unpack(KEYS)
check_arguments(7)
local lease_ms = whole(ARGV[5], 1)
local lease = job .. ':lease'
local notification = ARGV[2] .. ':' .. ARGV[1]
if ARGV[6] == 'release' then
  if redis.call('GET', lease) == ARGV[4] then
    redis.call('DEL', lease)
    redis.call('ZADD', open_jobs, 'XX', integer(now), job)
    redis.call('PUBLISH', ARGV[3], notification)
  end
  return {'released'}
end
local found = redis.call('HMGET', job, 'state', 'turn', 'wish')
local state = found[1]
if not state then
  redis.call('ZREM', open_jobs, job)
  return {'gone'}
end
if state == 'done' or state == 'failed' or state == 'cancelled' or (ARGV[7] ~= '' and found[2] ~= ARGV[7]) then
  return {'ended'}
end
local holder = redis.call('GET', lease)
if holder and holder ~= ARGV[4] then
  return {'taken'}
end
redis.call('SET', lease, ARGV[4], 'PX', lease_ms)
redis.call('ZADD', open_jobs, integer(now + lease_ms), job)
if ARGV[2] == 'tune' and state == 'waiting' then
  redis.call('HSET', job, 'state', 'running')
  redis.call('XADD', job .. ':events', '*', 'event', 'job', 'data', '{"state":"running"}')
  redis.call('PUBLISH', ARGV[3], notification)
end
return {'held', found[3] or ''}
