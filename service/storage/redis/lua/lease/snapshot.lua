-- The state of a compile, for its followers. A script, so that those of many requests cross to Redis together.
-- KEYS: events, lease, index, pending, pending_priorities. ARGV: the id after which events are wanted.
-- Returns {events, leased 1 or 0, cached 1 or 0, its position in the queue or 0}; an event is {id, {field, value, ...}}.
local events, lease, index, pending, priorities = unpack(KEYS)
local position, since = 0, redis.call('ZSCORE', pending, lease)
if since then
  local ahead = redis.call('ZCOUNT', pending, '-inf', '(' .. since)
  if redis.call('HEXISTS', priorities, lease) == 0 then -- what jobs have queued comes later
    ahead = math.max(0, ahead - redis.call('HLEN', priorities))
  end
  position = 1 + ahead
end
return {
  redis.call('XRANGE', events, '(' .. ARGV[1], '+'),
  redis.call('EXISTS', lease),
  redis.call('EXISTS', index),
  position,
}
