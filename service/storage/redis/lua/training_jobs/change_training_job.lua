-- End, cancel or resume a training job. Cancelling only asks: who drives the job ends it once its ranks have.
-- KEYS: job, lease, events, open, trains, history.
-- ARGV: id, 'end', 'cancel' or 'resume', owner (of who ends it), wake channel, detail, state that it ends with, event's
--       data or '', most open ones, '1' if who resumes it may have source compiled, number of the
--       driver's last news, how many events of a job that has ended are kept (of who ends it).
-- Returns {the state it has now, '1' if this changed it}, {} if there is no such job, or {'many', how many are open}.
local state = redis.call('HGET', KEYS[1], 'state')
if not state then
  return {}
end
local ended = state == 'done' or state == 'failed' or state == 'cancelled'
local time = redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
local function told()
  local number = redis.call('HINCRBY', KEYS[1], 'events', 1) .. '-0'
  redis.call('XADD', KEYS[3], number, 'event', 'state', 'data', ARGV[7])
  redis.call('XADD', KEYS[6], number, 'data', ARGV[7])
  redis.call('PUBLISH', ARGV[4], 'train:' .. ARGV[1])
end
if ARGV[2] == 'end' and not ended and redis.call('GET', KEYS[2]) == ARGV[3] then
  redis.call('HSET', KEYS[1], 'state', ARGV[6], 'ended', now, 'detail', ARGV[5], 'wish', '', 'told', ARGV[10])
  redis.call('HINCRBY', KEYS[1], 'turn', 1)
  redis.call('ZREM', KEYS[4], ARGV[1])
  redis.call('DEL', KEYS[2])
  told()
  redis.call('XTRIM', KEYS[3], 'MAXLEN', '~', ARGV[11])
  return {ARGV[6], '1'}
end
if ARGV[2] == 'cancel' and not ended and redis.call('HGET', KEYS[1], 'wish') == '' then
  redis.call('HSET', KEYS[1], 'wish', ARGV[5])
  redis.call('PUBLISH', ARGV[4], 'train:' .. ARGV[1])
  return {state, '1'}
end
if ARGV[2] == 'resume' and ended and state ~= 'done' then
  if redis.call('ZCARD', KEYS[4]) >= tonumber(ARGV[8]) then
    return {'many', redis.call('ZCARD', KEYS[4])}
  end
  redis.call('HSET', KEYS[1], 'state', 'waiting', 'ended', 0, 'detail', ARGV[5], 'wish', '', 'source', ARGV[9])
  redis.call('HINCRBY', KEYS[1], 'turn', 1)
  redis.call('HINCRBY', KEYS[1], 'resumes', 1)
  redis.call('ZADD', KEYS[4], redis.call('ZSCORE', KEYS[5], ARGV[1]) or now, ARGV[1])
  told()
  return {'waiting', '1'}
end
return {state, '0'}
