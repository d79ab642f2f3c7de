-- Begin a training job, or write it down again after Redis came back without it. The oldest that have ended make room.
-- KEYS: trains, open, job, events, history.
-- ARGV: id, most jobs, most open ones, prefix of jobs, created ms, wake channel, event's data or '', how many events were
--       told, then field and value of each field of the job.
-- Returns {'new'}, {'exists'} or {'many', how many are open}.
if redis.call('EXISTS', KEYS[3]) == 1 then
  return {'exists'}
end
if redis.call('ZCARD', KEYS[2]) >= tonumber(ARGV[3]) then
  return {'many', redis.call('ZCARD', KEYS[2])}
end
for at = 9, #ARGV, 2 do
  redis.call('HSET', KEYS[3], ARGV[at], ARGV[at + 1])
end
redis.call('HSET', KEYS[3], 'events', ARGV[8])
redis.call('ZADD', KEYS[1], ARGV[5], ARGV[1])
redis.call('ZADD', KEYS[2], ARGV[5], ARGV[1])
if ARGV[7] ~= '' then
  local number = redis.call('HINCRBY', KEYS[3], 'events', 1) .. '-0'
  redis.call('XADD', KEYS[4], number, 'event', 'state', 'data', ARGV[7])
  redis.call('XADD', KEYS[5], number, 'data', ARGV[7])
end
redis.call('PUBLISH', ARGV[6], 'train:' .. ARGV[1])
local surplus = redis.call('ZCARD', KEYS[1]) - tonumber(ARGV[2])
if surplus > 0 then
  for _, id in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
    if surplus > 0 and not redis.call('ZSCORE', KEYS[2], id) then
      local name = ARGV[4] .. id
      redis.call('DEL', name, name .. ':events', name .. ':metrics', name .. ':logs', name .. ':history',
        name .. ':lease', name .. ':files', name .. ':shelves')
      redis.call('ZREM', KEYS[1], id)
      surplus = surplus - 1
    end
  end
end
return {'new'}
