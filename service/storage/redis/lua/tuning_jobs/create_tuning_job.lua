-- Begin a batch job, or write it down again after Redis came back without it. The oldest that have ended make room.
-- KEYS: tunes, open, job, items, bodies, progress, results, events.
-- ARGV: id, most jobs, most open ones, prefix of jobs, job JSON, created ms, event, state, spent, trials, wake channel,
--       how many items, bodies, progress and results follow, turn; then number and value of each.
-- Returns {'new'}, {'exists'} or {'many', how many are open}.
if redis.call('EXISTS', KEYS[3]) == 1 then
  return {'exists'}
end
if redis.call('ZCARD', KEYS[2]) >= tonumber(ARGV[3]) then
  return {'many', redis.call('ZCARD', KEYS[2])}
end
local position = 17
for part = 1, 4 do
  for _ = 1, tonumber(ARGV[11 + part]) do
    redis.call('HSET', KEYS[3 + part], ARGV[position], ARGV[position + 1])
    if part == 3 then
      local state = cjson.decode(ARGV[position + 1]).state
      if state ~= 'waiting' and state ~= 'searching' then
        redis.call('HINCRBY', KEYS[3], 'n:' .. state, 1)
      end
    end
    position = position + 2
  end
end
redis.call('HSET', KEYS[3], 'job', ARGV[5], 'state', ARGV[8], 'ended', 0, 'spent', ARGV[9], 'trials', ARGV[10],
  'base_spent', ARGV[9], 'base_trials', ARGV[10], 'detail', '', 'turn', ARGV[16])
redis.call('ZADD', KEYS[1], ARGV[6], ARGV[1])
redis.call('ZADD', KEYS[2], ARGV[6], ARGV[1])
redis.call('XADD', KEYS[8], '*', 'event', 'job', 'data', ARGV[7])
redis.call('PUBLISH', ARGV[11], 'tune:' .. ARGV[1])
local surplus = redis.call('ZCARD', KEYS[1]) - tonumber(ARGV[2])
if surplus > 0 then
  for _, id in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
    if surplus > 0 and not redis.call('ZSCORE', KEYS[2], id) then
      local name = ARGV[4] .. id
      redis.call('DEL', name, name .. ':items', name .. ':bodies', name .. ':progress', name .. ':results',
        name .. ':events', name .. ':lease')
      redis.call('ZREM', KEYS[1], id)
      surplus = surplus - 1
    end
  end
end
return {'new'}
