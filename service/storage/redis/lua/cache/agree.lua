-- What a job agreed on for a key: the first to tell decides. The oldest jobs make room.
-- KEYS: the job's decisions, jobs. ARGV: key, verdict JSON, ttl ms, most keys of a job, most jobs, job, prefix of jobs.
-- Returns the verdict that stands, or nil for a job that has decided on too many keys.
local verdict = redis.call('HGET', KEYS[1], ARGV[1])
if not verdict and redis.call('HLEN', KEYS[1]) < tonumber(ARGV[4]) then
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
  verdict = ARGV[2]
end
local time = redis.call('TIME')
redis.call('ZADD', KEYS[2], string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000)), ARGV[6])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
while redis.call('ZCARD', KEYS[2]) > tonumber(ARGV[5]) do
  redis.call('DEL', ARGV[7] .. redis.call('ZPOPMIN', KEYS[2])[1])
end
return verdict
