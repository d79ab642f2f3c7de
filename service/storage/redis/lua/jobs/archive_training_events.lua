-- Note a segment: the oldest entries of a job's metrics, logs or history, now in the blob store. Delete them here.
-- KEYS: entries, segments, lease. ARGV: 'metrics', 'logs' or 'history', number of the last one that went,
-- first one's, owner:fence.
-- The field of a segment is `<series>:<first>`, its value the last one's number. Returns 1, or 0 (another holds the
-- lease).
check_arguments(4)
local last, first = whole(finite(ARGV[2]), 0), whole(finite(ARGV[3]), 0)
if redis.call('GET', KEYS[3]) ~= ARGV[4] then
  return 0
end
redis.call('HSET', KEYS[2], ARGV[1] .. ':' .. integer(first), integer(last))
redis.call('XTRIM', KEYS[1], 'MINID', integer(last + 1) .. '-0')
return 1
