-- Take the least recently used entries out of the index until the rest fits, and their blobs out of Redis; the
-- caller deletes those in the store. Of one namespace, down to its quota; or of all, down to the whole limit: then
-- each time of the namespace that holds the most bytes. Whenever all together hold too much that one is above an
-- equal share, so nobody loses anything to another while it keeps below one.
-- KEYS: namespaces, inline.
-- ARGV: prefix, default namespace, which namespace ('' for all), limit in bytes where no quota says otherwise
--       (0: no limit), most entries for one call.
-- Returns {namespace, key, digest, place, namespace, key, ...}. The newest entry of all always stays (who waited for
-- it is about to fetch it), and so does what is pinned: that is not in lru.
local limit = tonumber(ARGV[4])
local names = {ARGV[3]}
if ARGV[3] == '' then
  names = redis.call('HKEYS', KEYS[1])
  names[#names + 1] = redis.call('HEXISTS', KEYS[1], ARGV[2]) == 0 and ARGV[2] or nil
else
  local own = cjson.decode(redis.call('HGET', KEYS[1], ARGV[3]) or '{}')
  limit = own.bytes or limit
end
if limit <= 0 then
  return {}
end

local spaces, total = {}, 0
local newest, stamp = nil, -1
for i, name in ipairs(names) do
  local prefix = ARGV[1]
  if name ~= ARGV[2] then
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

local function look(space) -- at what goes next
  local oldest = redis.call('ZRANGE', space.prefix .. 'lru', 0, 0, 'WITHSCORES')
  space.key, space.used = oldest[1], tonumber(oldest[2])
  if space.key and space.prefix .. space.key == newest then
    space.key = nil
  end
end
for _, space in ipairs(spaces) do
  look(space)
end

local function first(a, b)
  return a.bytes > b.bytes or a.bytes == b.bytes and a.used < b.used
end

local out = {}
local left = tonumber(ARGV[5])
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
  local entry = redis.call('HMGET', prefix .. 'index:' .. key, 'digest', 'place', 'size')
  local size = redis.call('HGET', prefix .. 'sizes', key) or 0
  redis.call('ZREM', prefix .. 'lru', key)
  redis.call('DECRBY', prefix .. 'total', size)
  redis.call('HDEL', prefix .. 'sizes', key)
  redis.call('DEL', prefix .. 'index:' .. key)
  redis.call('HINCRBY', prefix .. 'stats', 'evictions', 1)
  if entry[2] == 'redis' then
    redis.call('DECRBY', KEYS[2], entry[3])
    redis.call('DEL', prefix .. 'blob:' .. entry[1])
  end
  if entry[1] then
    for _, part in ipairs({space.name, key, entry[1], entry[2]}) do
      out[#out + 1] = part
    end
  end
  total, space.bytes, left = total - size, space.bytes - size, left - 1
  look(space)
end
return out
