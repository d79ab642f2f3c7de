-- Take or renew the lease of a job, or leave it to others (lease_ms 0). Only its holder runs the job.
-- KEYS: job, its lease, fence, open_jobs. ARGV: id, kind ('tune' or 'train'), wake channel, owner, lease ms, how often
-- the job had been resumed when the caller read it, or ''. Returns {'held', fence, who cancelled the job, in words, or
-- ''}, {'taken'} by another, {'ended'} (the job has ended, or had and was resumed or forgotten), {'gone'} (there is no such
-- job) or {'left'}.
local job, lease, fence, open_jobs = unpack(KEYS)
local id, kind, wake, owner, lease_ms, resumes = unpack(ARGV)
check_arguments(6)
lease_ms = whole(lease_ms, 0)
local holder = holder_of(lease)
if lease_ms == 0 then
  if holder == owner then
    leave(lease, open_jobs, job)
    redis.call('PUBLISH', wake, kind .. ':' .. id)
  end
  return {'left'}
end
local state, current, cancelled_by = unpack(redis.call('HMGET', job, 'state', 'resumes', 'cancelled_by'))
if not state then
  redis.call('ZREM', open_jobs, job)
  return {redis.call('GET', lease) == 'forgotten' and 'ended' or 'gone'}
end
if has_ended(state) or (resumes ~= '' and current ~= resumes) then
  return {'ended'}
end
if holder and holder ~= owner then
  return {'taken'}
end
return {'held', hold(lease, fence, owner, lease_ms, open_jobs, job), cancelled_by or ''}
