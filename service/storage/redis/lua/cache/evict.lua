-- Take the least recently used entries out of the index until the rest fits, and their blobs out of Redis; the
-- caller deletes those in the store. `whose`: one namespace, down to its quota, or '' for all, down to `limit`; then
-- each entry is of the namespace that holds the most bytes. Above the limit that one has more than an equal share, so
-- no namespace below its share loses anything to another.
-- A call does a bounded part of that, however many namespaces there are. Of namespaces that hold the same it looks at
-- ALIKE, and takes what was used longest ago in these.
-- ARGV: limit: in bytes, where no quota says otherwise (0: no limit); most: entries for one call; asking: the caller's
-- namespace, where something may just have been published.
-- Returns {more, namespace, key, digest, place, namespace, key, ...}; more: 1 if the caller shall call again, else 0.
-- Of the namespaces looked at and the caller's, the entry used last stays (a client that waited for it is about to
-- fetch it), and so do pinned ones: they are not in lru.
local ALIKE = 8
local namespaces, inline, recount, changed = unpack(KEYS)
local installation, default, whose, limit, left, asking = unpack(ARGV)
local looks = 128 -- at namespaces, by one call
limit, left = comparable(limit), finite(left)
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
local callers = prefix_of(asking)

local function prefix_of_total(sum)
  return sum:sub(1, -1 - #'total')
end

local bytes, held = sums_of_all(inline)

local total
if whose ~= '' then
  total = tonumber(redis.call('GET', prefix_of(whose) .. 'total') or '0')
else
  total = tonumber(redis.call('GET', bytes) or '0')
end
if total <= limit then
  return {0}
end

local function largest() -- {name of a sum, bytes, ...}, the most bytes first
  return redis.call('ZRANGE', held, 0, ALIKE - 1, 'REV', 'WITHSCORES')
end

local newest, newest_used -- the entry used last, of the namespaces looked at
local function look_for_newest(prefix)
  local last = redis.call('ZRANGE', prefix .. 'lru', -1, -1, 'WITHSCORES')
  if last[1] and (not newest or tonumber(last[2]) > newest_used) then
    newest, newest_used = prefix .. last[1], tonumber(last[2])
  end
end

local function is_newest(prefix, key)
  if not newest then
    look_for_newest(callers)
    local others = whose == '' and largest() or {}
    for i = 1, #others, 2 do
      look_for_newest(prefix_of_total(others[i]))
    end
  end
  look_for_newest(prefix)
  return prefix .. key == newest
end

local function oldest_of(prefix) -- what goes next, and when it was used; and whether there is nothing but pinned ones
  local oldest = redis.call('ZRANGE', prefix .. 'lru', 0, 1, 'WITHSCORES')
  local key = oldest[1]
  if key and (oldest[3] or not is_newest(prefix, key)) then
    return key, tonumber(oldest[2])
  end
  return nil, nil, not key
end

-- The next entry of the largest namespaces: its prefix, and key. And whether `held` has changed: then look again.
local function next_of_largest()
  local most, found, key, used, other
  local sums = largest()
  for i = 1, #sums, 2 do
    local prefix, own = prefix_of_total(sums[i]), tonumber(sums[i + 1])
    if found and own < most then
      break
    end
    looks = looks - 1
    local candidate, since, all_pinned = oldest_of(prefix)
    if all_pinned then -- comes back with its next entry, by add_bytes
      redis.call('ZREM', held, sums[i])
      other = true
    elseif candidate and (not found or since < used) then
      most, found, key, used = own, prefix, candidate, since
    end
  end
  return found, key, other
end

local function next_entry()
  if whose ~= '' then
    return prefix_of(whose), (oldest_of(prefix_of(whose)))
  end
  while looks > 0 do
    local prefix, key, other = next_of_largest()
    if key or not other then
      return prefix, key
    end
  end
end

local out = {0}
while left > 0 and looks > 0 and total > limit do
  local prefix, key = next_entry()
  if not key then
    break
  end
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
    local name = prefix:sub(#installation + 1):match('^ns:(.*):$') or default
    for _, part in ipairs({name, key, entry[1], entry[2]}) do
      out[#out + 1] = part
    end
  end
  total, left = total - size, left - 1
end
if total > limit and (left == 0 or looks <= 0) then
  out[1] = 1
end
return out
