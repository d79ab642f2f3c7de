-- Take or renew the lease of a job, or leave it to others (lease_ms 0). Only its holder runs the job.
-- KEYS: job, its lease, fence, open_jobs. ARGV: id, kind ('tune' or 'train'), wake channel, owner, lease ms, turn or
-- ''. Returns {'held', fence, who cancelled the job, in words, or ''}, {'taken'} by another, {'ended'} (the job has
-- ended, or had and was resumed since this turn), {'gone'} (there is no such job) or {'left'}.
local job, lease, fence, open_jobs = unpack(KEYS)
local id, kind, wake, owner, lease_ms, turn = unpack(ARGV)
check_arguments(6)
lease_ms = whole(lease_ms, 0)
local notification = kind .. ':' .. id
local holder = holder_of(lease)
if lease_ms == 0 then
  if holder == owner then
    leave(lease, open_jobs, job)
    redis.call('PUBLISH', wake, notification)
  end
  return {'left'}
end
local state, current, wish = unpack(redis.call('HMGET', job, 'state', 'turn', 'wish'))
if not state then
  redis.call('ZREM', open_jobs, job)
  return {'gone'}
end
if state == 'done' or state == 'failed' or state == 'cancelled' or (turn ~= '' and current ~= turn) then
  return {'ended'}
end
if holder and holder ~= owner then
  return {'taken'}
end
local number = hold(lease, fence, owner, lease_ms, open_jobs, job)
if kind == 'tune' and state == 'waiting' then
  redis.call('HSET', job, 'state', 'running')
  redis.call('XADD', job .. ':events', '*', 'event', 'job', 'data', '{"state":"running"}')
  redis.call('PUBLISH', wake, notification)
end
return {'held', number, wish or ''}
