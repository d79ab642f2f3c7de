-- Take out an entry whose blob is lost, damaged or signed by an untrusted key. What Redis holds of it expires.
-- KEYS: Keys.entry_keys. ARGV: the audit entry's fields come last.
-- Returns 1 if this call dropped it: an entry published since, with another digest, stays.
local index, lru, pinned, sizes, namespace_bytes, bytes, inline, stats, audit = unpack(KEYS)
local key, most_audited, blob_prefix, bad_digest, evidence_ms = unpack(ARGV)
check_arguments(5, 2, 1)
most_audited, evidence_ms = whole(most_audited, 0), whole(evidence_ms, 0)
local digest, place = unpack(redis.call('HMGET', index, 'digest', 'place'))
if digest ~= bad_digest then
  return 0
end
check_sums(bytes, inline)
count(stats, 'damaged', 1)
if place == 'redis' then
  redis.call('PEXPIRE', blob_prefix .. digest, evidence_ms)
end
drop_entry(key, index, lru, pinned, sizes, namespace_bytes, bytes, inline)
redis.call('XADD', audit, 'MAXLEN', '~', most_audited, '*', unpack(ARGV, 6))
return 1
