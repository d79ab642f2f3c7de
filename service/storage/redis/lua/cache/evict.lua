-- Take the least recently used entries out of the index until the rest fits, and their blobs out of Redis; the
-- caller deletes those in the store. `whose`: one namespace, down to its quota, or '' for all, down to `limit`; then
-- each entry is of the namespace that holds the most bytes. Above the limit that one has more than an equal share, so
-- no namespace below its share loses anything to another.
-- ARGV: limit: in bytes, where no quota says otherwise (0: no limit); most: entries for one call.
-- Returns {namespace, key, digest, place, namespace, key, ...}. The newest entry of all always stays (a client that
-- waited for it is about to fetch it), and so do pinned ones: they are not in lru.
local namespaces, inline, recount = unpack(KEYS)
local installation, default, whose, limit, left = unpack(ARGV)
limit, left = tonumber(limit), tonumber(left)
local names = {whose}
if whose == '' then
  names = redis.call('HKEYS', namespaces)
  names[#names + 1] = redis.call('HEXISTS', namespaces, default) == 0 and default or nil
else
  local own = cjson.decode(redis.call('HGET', namespaces, whose) or '{}')
  limit = own.bytes or limit
end
if limit <= 0 then
  return {}
end

local spaces, total = {}, 0
local newest, stamp = nil, -1
for i, name in ipairs(names) do
  local prefix = installation
  if name ~= default then
    prefix = prefix .. 'ns:' .. name .. ':'
  end
  local space = {name = name, prefix = prefix, bytes = tonumber(redis.call('GET', prefix .. 'total') or '0')}
  local last = redis.call('ZRANGE', prefix .. 'lru', -1, -1, 'WITHSCORES')
  if last[1] and tonumber(last[2]) > stamp then
    newest, stamp = prefix .. last[1], tonumber(last[2])
  end
  spaces[i] = space
  total = total + space.bytes
end

local function find_oldest(space) -- what goes next
  local oldest = redis.call('ZRANGE', space.prefix .. 'lru', 0, 0, 'WITHSCORES')
  space.key, space.used = oldest[1], tonumber(oldest[2])
  if space.key and space.prefix .. space.key == newest then
    space.key = nil
  end
end
for _, space in ipairs(spaces) do
  find_oldest(space)
end

local function first(a, b)
  return a.bytes > b.bytes or a.bytes == b.bytes and a.used < b.used
end

local out = {}
while left > 0 and total > limit do
  local space
  for _, each in ipairs(spaces) do
    if each.key and (not space or first(each, space)) then
      space = each
    end
  end
  if not space then
    break
  end
  local prefix, key = space.prefix, space.key
  local index, sizes = prefix .. 'index:' .. key, prefix .. 'sizes'
  local entry = redis.call('HMGET', index, 'digest', 'place')
  local size = redis.call('HGET', sizes, key) or 0
  drop_entry(key, index, prefix .. 'lru', prefix .. 'pinned', sizes, prefix .. 'total', inline, recount)
  redis.call('HINCRBY', prefix .. 'stats', 'evictions', 1)
  if entry[2] == 'redis' then
    redis.call('DEL', prefix .. 'blob:' .. entry[1])
  end
  if entry[1] then
    for _, part in ipairs({space.name, key, entry[1], entry[2]}) do
      out[#out + 1] = part
    end
  end
  total, space.bytes, left = total - size, space.bytes - size, left - 1
  find_oldest(space)
end
return out
