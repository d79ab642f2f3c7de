-- Take the least recently used entries out of the index until the rest fits, and their blobs out of Redis; the
-- caller deletes those in the store. `whose`: one namespace, down to its quota, or '' for all, down to `limit`; then
-- each entry is of the namespace that holds the most bytes. Above the limit that one has more than an equal share, so
-- no namespace below its share loses anything to another.
-- ARGV: limit: in bytes, where no quota says otherwise (0: no limit); most: entries for one call.
-- Returns {namespace, key, digest, place, namespace, key, ...}. The newest entry of all always stays (a client that
-- waited for it is about to fetch it), and so do pinned ones: they are not in lru.
local namespaces, inline, recount, changed = unpack(KEYS)
local installation, default, whose, limit, left = unpack(ARGV)
limit, left = tonumber(limit), tonumber(left)
if whose ~= '' then
  local own = cjson.decode(redis.call('HGET', namespaces, whose) or '{}')
  limit = own.bytes or limit
end
if limit <= 0 then
  return {}
end

local function prefix_of(name)
  return name == default and installation or installation .. 'ns:' .. name .. ':'
end

local function all_names()
  local names = redis.call('HKEYS', namespaces)
  names[#names + 1] = redis.call('HEXISTS', namespaces, default) == 0 and default or nil
  return names
end

local bytes, held = sums_of_all(inline)
local total
if whose ~= '' then
  total = tonumber(redis.call('GET', prefix_of(whose) .. 'total') or '0')
else
  if redis.call('EXISTS', bytes) == 0 then -- an older version made none
    redis.call('SET', bytes, 0)
    redis.call('DEL', held)
    for _, name in ipairs(all_names()) do
      local own = redis.call('GET', prefix_of(name) .. 'total') or '0'
      redis.call('INCRBY', bytes, own)
      redis.call('ZADD', held, own, prefix_of(name) .. 'total')
    end
  end
  total = tonumber(redis.call('GET', bytes))
end
if total <= limit then
  return {}
end

-- The entry used last of all namespaces, looked for when a namespace has only one left.
local newest
local function is_newest(prefix, key)
  if not newest then
    local stamp = -1
    for _, name in ipairs(whose ~= '' and {whose} or all_names()) do
      local last = redis.call('ZRANGE', prefix_of(name) .. 'lru', -1, -1, 'WITHSCORES')
      if last[1] and tonumber(last[2]) > stamp then
        newest, stamp = prefix_of(name) .. last[1], tonumber(last[2])
      end
    end
  end
  return prefix .. key == newest
end

local function oldest_of(prefix) -- what goes next, and when it was used
  local oldest = redis.call('ZRANGE', prefix .. 'lru', 0, 1, 'WITHSCORES')
  local key = oldest[1]
  if key and (oldest[3] or not is_newest(prefix, key)) then
    return key, tonumber(oldest[2])
  end
end

local function next_entry() -- of the namespace that holds the most; of several, what was used longest ago
  if whose ~= '' then
    return whose, (oldest_of(prefix_of(whose)))
  end
  local rank, most, found, key, used = 0, nil, nil, nil, nil
  while true do
    local own = redis.call('ZRANGE', held, rank, rank, 'REV', 'WITHSCORES')
    if not own[1] or (found and tonumber(own[2]) < most) then
      return found, key
    end
    local prefix = own[1]:sub(1, -1 - #'total')
    local now_held = redis.call('GET', own[1]) or '0'
    if tonumber(now_held) ~= tonumber(own[2]) then -- an older version changed it
      redis.call('ZADD', held, now_held, own[1])
      redis.call('INCRBY', bytes, integer(now_held - own[2]))
      total = tonumber(redis.call('GET', bytes))
      rank, most, found, key, used = 0, nil, nil, nil, nil
    else
      local candidate, since = oldest_of(prefix)
      if candidate and (not found or since < used) then
        most, found, key, used = tonumber(own[2]), prefix:sub(#installation + 1):match('^ns:(.*):$') or default,
          candidate, since
      end
      rank = rank + 1
    end
  end
end

local out = {}
while left > 0 and total > limit do
  local name, key = next_entry()
  if not key then
    break
  end
  local prefix = prefix_of(name)
  local index, sizes = prefix .. 'index:' .. key, prefix .. 'sizes'
  local entry = redis.call('HMGET', index, 'digest', 'place')
  local size = redis.call('HGET', sizes, key) or 0
  drop_entry(key, index, prefix .. 'lru', prefix .. 'pinned', sizes, prefix .. 'total', inline, recount)
  redis.call('HINCRBY', prefix .. 'stats', 'evictions', 1)
  redis.call('SADD', changed, prefix .. 'stats')
  if entry[2] == 'redis' then
    redis.call('DEL', prefix .. 'blob:' .. entry[1])
  end
  if entry[1] then
    for _, part in ipairs({name, key, entry[1], entry[2]}) do
      out[#out + 1] = part
    end
  end
  total, left = total - size, left - 1
end
return out
