-- What a job agreed on for a key: the first verdict stands. The oldest jobs make room.
-- Returns the verdict that stands, or nil for a job that has decided on too many keys.
local decisions, jobs = unpack(KEYS)
local key, verdict, ttl_ms, most_keys, most_jobs, job, prefix = unpack(ARGV)
check_arguments(7)
ttl_ms, most_keys, most_jobs = whole(ttl_ms, 1), whole(most_keys, 0), whole(most_jobs, 0)
local standing = redis.call('HGET', decisions, key)
if not standing and redis.call('HLEN', decisions) < most_keys then
  redis.call('HSET', decisions, key, verdict)
  standing = verdict
end
redis.call('ZADD', jobs, integer(now), job)
redis.call('PEXPIRE', decisions, ttl_ms)
redis.call('PEXPIRE', jobs, ttl_ms)
forget_oldest(jobs, most_jobs, prefix)
return standing
