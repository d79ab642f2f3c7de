-- Drive a training job, or go on driving it: who holds the lease may.
-- KEYS: job, lease. ARGV: id, owner, lease ms, 'take' or 'release', wake channel, turn or ''.
-- Returns {'held', who cancelled it, in words, or ''}, {'taken'} by another, {'ended'} (the job has, or had and was
-- resumed since this turn of it), {'gone'} (there is no such job) or {'released'}.
if ARGV[4] == 'release' then
  if redis.call('GET', KEYS[2]) == ARGV[2] then
    redis.call('DEL', KEYS[2])
    redis.call('PUBLISH', ARGV[5], 'train:' .. ARGV[1])
  end
  return {'released'}
end
local found = redis.call('HMGET', KEYS[1], 'state', 'turn', 'wish')
local state = found[1]
if not state then
  return {'gone'}
end
if state == 'done' or state == 'failed' or state == 'cancelled' or (ARGV[6] ~= '' and found[2] ~= ARGV[6]) then
  return {'ended'}
end
local holder = redis.call('GET', KEYS[2])
if holder and holder ~= ARGV[2] then
  return {'taken'}
end
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
return {'held', found[3]}
