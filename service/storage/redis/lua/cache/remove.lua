-- Take an entry out of the index, pinned or not, and its blob out of Redis; the caller deletes one in the store.
-- KEYS: Keys.entry_keys. ARGV: the audit entry's fields come last. Returns nil, or {digest, place}.
local index, lru, pinned, sizes, namespace_bytes, bytes, inline, _, audit = unpack(KEYS)
local key, most_audited, blob_prefix = unpack(ARGV)
check_arguments(3, 2, 1)
most_audited = whole(most_audited, 0)
local digest, place = unpack(redis.call('HMGET', index, 'digest', 'place'))
if not digest then
  return false
end
check_sums(bytes, inline)
drop_entry(key, index, lru, pinned, sizes, namespace_bytes, bytes, inline)
if place == 'redis' then
  redis.call('DEL', blob_prefix .. digest)
end
local event = {unpack(ARGV, 4)}
event[#event + 1] = 'digest'
event[#event + 1] = digest
redis.call('XADD', audit, 'MAXLEN', '~', most_audited, '*', unpack(event))
return {digest, place}
