-- Drive a batch job, or go on driving it: who holds the lease may.
-- KEYS: job, lease, events. ARGV: id, owner, lease ms, 'take' or 'release', wake channel, turn or ''.
-- Returns {'held'}, {'taken'} by another, {'ended'} (the job has, or had and was resumed since this turn of it), {'gone'}
-- (there is no such job) or {'released'}.
if ARGV[4] == 'release' then
  if redis.call('GET', KEYS[2]) == ARGV[2] then
    redis.call('DEL', KEYS[2])
    redis.call('PUBLISH', ARGV[5], 'tune:' .. ARGV[1])
  end
  return {'released'}
end
local state = redis.call('HGET', KEYS[1], 'state')
if not state then
  return {'gone'}
end
if state == 'done' or state == 'cancelled' or (ARGV[6] ~= '' and redis.call('HGET', KEYS[1], 'turn') ~= ARGV[6]) then
  return {'ended'}
end
local holder = redis.call('GET', KEYS[2])
if holder and holder ~= ARGV[2] then
  return {'taken'}
end
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
if state == 'waiting' then
  redis.call('HSET', KEYS[1], 'state', 'running')
  redis.call('XADD', KEYS[3], '*', 'event', 'job', 'data', '{"state":"running"}')
  redis.call('PUBLISH', ARGV[5], 'tune:' .. ARGV[1])
end
return {'held'}
