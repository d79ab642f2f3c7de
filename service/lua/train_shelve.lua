-- The oldest entries of a job's metrics or logs have gone to the blob store: note where, and forget them here.
-- KEYS: entries, shelves. ARGV: 'metrics' or 'logs', number of the last one that went, first one's.
-- A shelf is noted as `<what>:<first>`, with the last one's number.
redis.call('HSET', KEYS[2], ARGV[1] .. ':' .. ARGV[3], ARGV[2])
redis.call('XTRIM', KEYS[1], 'MINID', (tonumber(ARGV[2]) + 1) .. '-0')
return 1
