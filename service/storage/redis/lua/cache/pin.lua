-- Pin an entry or unpin it: a pinned key is in `pinned` instead of in `lru`, from which evict.lua takes.
-- KEYS: Keys.entry_keys. ARGV: action: 'pinned' or 'unpinned'; the audit entry's fields come last.
-- Returns 1, or 0 when there is no such entry.
local index, lru, pinned, _, total, inline, _, audit, recount = unpack(KEYS)
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
  check_sums(total, inline, recount)
  redis.call('ZREM', from, key)
  redis.call('ZADD', to, used, key)
  add_bytes(0, 'store', total, inline) -- evict.lua takes a namespace with nothing but pinned entries out of `held`
  redis.call('XADD', audit, 'MAXLEN', '~', most_audited, '*', unpack(ARGV, 4))
end
return 1
