-- An entry of the index, and its blob if Redis holds it. It only reads, so that it works on a Redis that takes no writes.
-- KEYS: the entry's index. ARGV: prefix of blobs; have: the digest of a blob that the caller holds, which is not sent
-- again. Returns nil, or {digest, size, place, seconds that it saves, blob or nil}.
local digest, size, place, seconds = unpack(redis.call('HMGET', KEYS[1], 'digest', 'size', 'place', 'seconds'))
if not digest then
  return false
end
local blob = place == 'redis' and digest ~= ARGV[2] and redis.call('GET', ARGV[1] .. digest)
return {digest, size, place, seconds_saved(seconds), blob}
