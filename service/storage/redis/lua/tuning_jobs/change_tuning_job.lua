-- End, cancel or resume a batch job.
-- KEYS: job, lease, progress, events, open, tunes.
-- ARGV: id, 'end', 'cancel' or 'resume', owner (of who ends it), wake channel, detail.
-- Returns {the state it has now, '1' if this changed it}, or {} if there is no such job.
local state = redis.call('HGET', KEYS[1], 'state')
if not state then
  return {}
end
local ended = state == 'done' or state == 'cancelled'
local time = redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
local becomes = nil
if ARGV[2] == 'end' and not ended and redis.call('GET', KEYS[2]) == ARGV[3] then
  becomes = 'done'
elseif ARGV[2] == 'cancel' and not ended then
  becomes = 'cancelled'
elseif ARGV[2] == 'resume' and ended then
  becomes = 'waiting'
end
if not becomes then
  return {state, '0'}
end
if becomes == 'waiting' then
  local again = { failed = true, skipped = true, searching = true }
  local progress = redis.call('HGETALL', KEYS[3])
  for i = 1, #progress, 2 do
    if again[cjson.decode(progress[i + 1]).state] then
      redis.call('HDEL', KEYS[3], progress[i])
    end
  end
  redis.call('HDEL', KEYS[1], 'n:failed', 'n:skipped')
  redis.call('HSET', KEYS[1], 'base_spent', redis.call('HGET', KEYS[1], 'spent'),
    'base_trials', redis.call('HGET', KEYS[1], 'trials'), 'ended', 0)
  redis.call('ZADD', KEYS[5], redis.call('ZSCORE', KEYS[6], ARGV[1]) or now, ARGV[1])
else
  redis.call('HSET', KEYS[1], 'ended', now)
  redis.call('ZREM', KEYS[5], ARGV[1])
  redis.call('DEL', KEYS[2])
end
redis.call('HSET', KEYS[1], 'state', becomes, 'detail', ARGV[5])
redis.call('HINCRBY', KEYS[1], 'turn', 1)
redis.call('XADD', KEYS[4], '*', 'event', 'job', 'data', '{"state":"' .. becomes .. '"}')
redis.call('PUBLISH', ARGV[4], 'tune:' .. ARGV[1])
return {becomes, '1'}
