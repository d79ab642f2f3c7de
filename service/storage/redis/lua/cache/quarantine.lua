-- Take out an entry whose blob is lost, damaged or signed by an untrusted key, and take back what lookup.lua counted.
-- What Redis holds of it expires.
-- KEYS: Keys.entry_keys. ARGV: use: 'hit' or 'fetch'; the audit entry's fields come last.
-- Returns 1 if this call dropped it: an entry published since, with another digest, stays.
local index, lru, pinned, sizes, total, inline, stats, audit, recount = unpack(KEYS)
local key, most_audited, blob_prefix, bad_digest, use, evidence_ms = unpack(ARGV)
local digest, size, seconds, place = unpack(redis.call('HMGET', index, 'digest', 'size', 'seconds', 'place'))
if use == 'hit' then
  redis.call('HINCRBY', stats, 'requests', -1)
  redis.call('HINCRBY', stats, 'hits', -1)
else
  redis.call('HINCRBY', stats, 'fetches', -1)
end
if digest ~= bad_digest then
  return 0
end
if use == 'hit' then
  redis.call('HINCRBYFLOAT', stats, 'seconds_saved', '-' .. seconds_saved(seconds))
end
redis.call('HINCRBY', stats, 'bytes_served', integer(0 - size)) -- Redis refuses '-0'
redis.call('HINCRBY', stats, 'damaged', 1)
if place == 'redis' then
  redis.call('PEXPIRE', blob_prefix .. digest, evidence_ms)
end
drop_entry(key, index, lru, pinned, sizes, total, inline, recount)
redis.call('XADD', audit, 'MAXLEN', '~', most_audited, '*', unpack(ARGV, 7))
return 1
