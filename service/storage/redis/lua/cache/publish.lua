-- Offer an artifact whose blob is already stored. The first publication of a key stands. Only the lease's holder
-- publishes, or an administrator who imports: that ends a compile in progress as its own result would.
-- KEYS: Keys.entry_keys, then Keys.compile_keys. ARGV: token: owner:fence or 'import'; searched, recalled: tuning
-- problems that were measured, and that were known; unverified: 1 if nothing was compared with eager, else 0; the
-- audit entry's fields come last.
-- Returns {'published', digest}, {'exists', digest}, {'refused'} or {'blobless'}.
local index, lru, _, sizes, namespace_bytes, bytes, inline, stats, audit = unpack(KEYS)
local _, lease, _, active, events, request, run, waiters, _, _, _, _, kills, pending = unpack(KEYS, 10)
local key, most_audited, blob, token, digest, size, place, namespace = unpack(ARGV)
local seconds, ttl_ms, wake, searched, recalled, unverified = unpack(ARGV, 9)
check_arguments(14, 2, 1)
most_audited, ttl_ms = whole(most_audited, 0), whole(ttl_ms, 1)
size, seconds, searched = integer(finite(size)), finite(seconds), finite(searched)
recalled, unverified = finite(recalled), finite(unverified)
local existing = redis.call('HGET', index, 'digest')
if existing == digest then
  if redis.call('HGET', index, 'place') == 'redis' then
    redis.call('PERSIST', blob) -- it was written again, with an expiry
  end
  return {'published', existing} -- the same call again, after a lost answer
end
if existing then
  return {'exists', existing}
end
local imported = token == 'import'
if not imported and redis.call('GET', lease) ~= token then
  return {'refused'}
end
if place == 'redis' and redis.call('EXISTS', blob) == 0 then
  return {'blobless'}
end
check_sums(bytes, inline)
check_counters(redis.call('HMGET', stats, 'compiles', 'problems_searched', 'problems_recalled', 'unverified'))
finite(redis.call('HGET', stats, 'seconds_saved') or 0)
local joins = number_or(0, redis.call('HGET', run, 'joins'))
if place == 'redis' then
  redis.call('PERSIST', blob)
end
redis.call('HSET', index, 'digest', digest, 'size', size, 'place', place, 'namespace', namespace,
  'seconds', string.format('%.6f', seconds), 'created', integer(now))
redis.call('ZADD', lru, integer(now), key)
add_bytes(0 - number_or(0, redis.call('HGET', sizes, key)), 'store', lru, namespace_bytes, bytes, inline)
redis.call('HSET', sizes, key, size)
add_bytes(size, place, lru, namespace_bytes, bytes, inline)
add_event(events, run, ttl_ms, 'done', '', '')
if not imported then
  count(stats, 'compiles', 1)
  count(stats, 'problems_searched', searched)
  count(stats, 'problems_recalled', recalled)
  count(stats, 'unverified', unverified)
end
count(stats, 'seconds_saved', joins * seconds)
redis.call('DEL', lease, run, request, waiters, kills)
redis.call('ZREM', active, key)
redis.call('ZREM', pending, lease)
redis.call('XADD', audit, 'MAXLEN', '~', most_audited, '*', unpack(ARGV, 15))
redis.call('PUBLISH', wake, key)
return {'published', digest}
