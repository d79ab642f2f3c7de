-- Take the least recently used entries out of the index until the rest fits, and their blobs out of Redis; the
-- caller deletes those in the store. Of one namespace, down to its quota; or of all, down to the whole limit.
-- KEYS: namespaces, inline.
-- ARGV: prefix, default namespace, which namespace ('' for all), limit in bytes where no quota says otherwise
--       (0: no limit), most entries for one call.
-- Returns {namespace, key, digest, place, namespace, key, ...}. The newest entry always stays, and so does
-- what is pinned: that is not in lru.
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

local spaces, total, entries = {}, 0, 0
local function look(space) -- at what goes next
  local oldest = redis.call('ZRANGE', space.prefix .. 'lru', 0, 0, 'WITHSCORES')
  space.key, space.used = oldest[1], tonumber(oldest[2])
end
for i, name in ipairs(names) do
  local prefix = ARGV[1]
  if name ~= ARGV[2] then
    prefix = prefix .. 'ns:' .. name .. ':'
  end
  spaces[i] = {name = name, prefix = prefix}
  look(spaces[i])
  total = total + tonumber(redis.call('GET', prefix .. 'total') or '0')
  entries = entries + redis.call('ZCARD', prefix .. 'lru')
end

local out = {}
local left = tonumber(ARGV[5])
while left > 0 and total > limit and entries > 1 do
  local space
  for _, each in ipairs(spaces) do
    if each.key and (not space or each.used < space.used) then
      space = each
    end
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
  total, entries, left = total - size, entries - 1, left - 1
  look(space)
end
return out
