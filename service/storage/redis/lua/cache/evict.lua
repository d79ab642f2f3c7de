-- Take the least recently used entries out of the index until the rest fits, and their blobs out of Redis; the
-- caller deletes those in the store. `whose`: one namespace, down to its quota, or '' for all, down to `limit`; then
-- each entry is of the namespace that holds the most bytes. Above the limit that one has more than an equal share, so
-- no namespace below its share loses anything to another.
-- KEYS: namespaces, then Keys.sum_keys. ARGV: limit: in bytes, where no quota says otherwise (0: no limit); most:
-- entries for one call; asking: the caller's namespace, where something may just have been published.
-- Returns {more, namespace, key, digest, place, namespace, key, ...}; more: 1 if the caller shall call again, else 0.
-- Of the caller's namespace the entry used last stays (a client that waited for it is about to fetch it), and so do
-- pinned ones of all: they are not in lru.
local namespaces, namespace_bytes, bytes, inline = unpack(KEYS)
local installation, default, whose, limit, most, asking = unpack(ARGV)
limit, most = comparable(limit), finite(most)
if whose ~= '' then
  local own = cjson.decode(redis.call('HGET', namespaces, whose) or '{}')
  limit = own.bytes or limit
end
if limit <= 0 then
  return {0}
end

local function prefix_of(name)
  return name == default and installation or installation .. 'ns:' .. name .. ':'
end

local callers = prefix_of(asking) .. 'lru'
local newest = redis.call('ZRANGE', callers, -1, -1)[1]
local function oldest_of(lru)
  local key = redis.call('ZRANGE', lru, 0, 0)[1]
  return (lru ~= callers or key ~= newest) and key or nil
end

local function next_entry() -- its namespace's lru, and its key
  if whose ~= '' then
    local lru = prefix_of(whose) .. 'lru'
    return lru, oldest_of(lru)
  end
  for rank = 0, redis.call('ZCARD', namespace_bytes) - 1 do -- the first, unless all that it holds stays
    local lru = redis.call('ZRANGE', namespace_bytes, rank, rank, 'REV')[1]
    local key = oldest_of(lru)
    if key then
      return lru, key
    end
  end
end

local function total()
  if whose ~= '' then
    return tonumber(redis.call('ZSCORE', namespace_bytes, prefix_of(whose) .. 'lru') or '0')
  end
  return tonumber(redis.call('GET', bytes) or '0')
end

local out = {0}
while total() > limit do
  if most <= 0 then
    out[1] = 1
    break
  end
  local lru, key = next_entry()
  if not key then
    break
  end
  local prefix = lru:sub(1, -1 - #'lru')
  local index = prefix .. 'index:' .. key
  local digest, tier = unpack(redis.call('HMGET', index, 'digest', 'place'))
  drop_entry(key, index, lru, prefix .. 'pinned', prefix .. 'sizes', namespace_bytes, bytes, inline)
  count(prefix .. 'stats', 'evictions', 1)
  if tier == 'redis' then
    redis.call('DEL', prefix .. 'blob:' .. digest)
  end
  if digest then
    local name = prefix:sub(#installation + 1):match('^ns:(.*):$') or default
    for _, part in ipairs({name, key, digest, tier}) do
      out[#out + 1] = part
    end
  end
  most = most - 1
end
return out
