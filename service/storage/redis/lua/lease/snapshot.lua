-- The state of a compile, for its followers. A script, so that those of many requests cross to Redis together.
-- KEYS: events, lease, index, pending. ARGV: the id after which events are wanted.
-- Returns {events, leased 1 or 0, cached 1 or 0, pending 1 or 0}; an event is {id, {field, value, ...}}.
local events, lease, index, pending = unpack(KEYS)
return {
  redis.call('XRANGE', events, '(' .. ARGV[1], '+'),
  redis.call('EXISTS', lease),
  redis.call('EXISTS', index),
  redis.call('ZSCORE', pending, lease) and 1 or 0,
}
