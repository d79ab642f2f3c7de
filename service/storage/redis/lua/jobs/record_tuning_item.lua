-- Record how far an item of a tuning job is, as the holder of the job's lease. An item that has ended stays as it is.
-- KEYS: job, lease, progress, results, events.
-- ARGV: id, owner:fence, number, progress JSON, state, results or '', seconds, trials, wake channel, most events.
-- Returns 'recorded', 'ended' (the item had) or 'lost' (another holds the lease, or the job has ended).
check_arguments(10)
local most_events = whole(ARGV[10], 0)
local seconds, trials = string.format('%.6f', finite(ARGV[7])), integer(finite(ARGV[8]))
local state = redis.call('HGET', KEYS[1], 'state')
if redis.call('GET', KEYS[2]) ~= ARGV[2] or state == 'done' or state == 'cancelled' then
  return 'lost'
end
local open = { waiting = true, searching = true }
local before = redis.call('HGET', KEYS[3], ARGV[3])
if before and not open[cjson.decode(before).state] then
  return 'ended'
end
check_counters(redis.call('HMGET', KEYS[1], 'n:' .. ARGV[5], 'trials', 'bytes'))
finite(redis.call('HGET', KEYS[1], 'spent') or 0)
redis.call('HSET', KEYS[3], ARGV[3], ARGV[4])
if not open[ARGV[5]] then
  redis.call('HINCRBY', KEYS[1], 'n:' .. ARGV[5], 1)
  redis.call('HINCRBYFLOAT', KEYS[1], 'spent', seconds)
  redis.call('HINCRBY', KEYS[1], 'trials', trials)
  redis.call('HINCRBY', KEYS[1], 'bytes', #ARGV[4] + #ARGV[6])
  if ARGV[6] ~= '' then
    redis.call('HSET', KEYS[4], ARGV[3], ARGV[6])
  end
end
redis.call('XADD', KEYS[5], 'MAXLEN', '~', most_events, '*', 'event', 'item', 'data', ARGV[4])
redis.call('PUBLISH', ARGV[9], 'tune:' .. ARGV[1])
return 'recorded'
