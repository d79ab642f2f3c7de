-- Pin an entry or unpin it: a pinned key is in `pinned` instead of in `lru`, from which evict.lua takes.
-- KEYS: Keys.entry_keys. ARGV: action: 'pinned' or 'unpinned'; the audit entry's fields come last.
-- Returns 1, or 0 when there is no such entry.
local index, lru, pinned, _, _, _, _, _, audit = unpack(KEYS)
local key, most_audited, action = unpack(ARGV)
check_arguments(3, 2, 1)
most_audited = whole(most_audited, 0)
if redis.call('EXISTS', index) == 0 then
  return 0
end
local from, to = lru, pinned
if action == 'unpinned' then
  from, to = to, from
end
local used = redis.call('ZSCORE', from, key)
if used then
  redis.call('ZREM', from, key)
  redis.call('ZADD', to, used, key)
  redis.call('XADD', audit, 'MAXLEN', '~', most_audited, '*', unpack(ARGV, 4))
end
return 1
