-- The time, and steps that several scripts share. storage/redis/scripts.py puts this before every script.
local clock = redis.call('TIME')
local microseconds = clock[1] * 1000000 + clock[2]
local now = math.floor(microseconds / 1000) -- ms since 1970

local function integer(number) -- as Redis takes it
  return string.format('%.0f', number)
end

-- A number that Redis can add. A script does not roll back: each takes its numbers before its first write.
local function finite(text)
  local number = tonumber(text)
  if not number or number ~= number or math.abs(number) == math.huge then
    error('no number: ' .. tostring(text))
  end
  return number
end

-- Seconds that an entry of the index saves. 0 for what cannot be added, as older versions could write it.
local function seconds_saved(text)
  local ok, seconds = pcall(finite, text)
  return string.format('%.6f', ok and seconds or 0)
end

-- A lease's new fence. It is higher than all before, even if Redis has lost them: never below the clock.
local function next_fence(fence)
  local number = integer(math.max(tonumber(redis.call('GET', fence) or '0') + 1, microseconds))
  redis.call('SET', fence, number)
  return number
end

-- Append an event to a compile's stream.
local function add_event(events, run, ttl_ms, stage, detail, failure)
  local started = tonumber(redis.call('HGET', run, 'started') or now)
  redis.call('XADD', events, 'MAXLEN', '~', 1000, '*', 'stage', stage,
    'seconds', string.format('%.3f', (now - started) / 1000), 'detail', detail, 'error', failure)
  redis.call('PEXPIRE', events, ttl_ms)
end

-- Beside `inline`, which every script that needs them has: the sum of all `total`, and these by their size (keys.py).
local function sums_of_all(inline)
  local installation = inline:sub(1, -1 - #'inline')
  return installation .. 'bytes', installation .. 'held'
end

-- Add an entry's size to the sums, or take it from them. Sums of all are there once evict.lua or a count has made
-- them.
local function add_bytes(size, place, total, inline)
  local own, bytes, held = redis.call('INCRBY', total, integer(size)), sums_of_all(inline)
  if redis.call('EXISTS', bytes) == 1 then
    redis.call('INCRBY', bytes, integer(size))
    redis.call('ZADD', held, own, total)
  end
  if place == 'redis' then
    redis.call('INCRBY', inline, integer(size))
  end
end

-- The same for the sums of a count in progress (count_entries.lua): their fields are the names of the sums.
local function add_counted(size, place, total, inline, recount)
  redis.call('HINCRBY', recount, total, integer(size))
  if place == 'redis' then
    redis.call('HINCRBY', recount, inline, integer(size))
  end
end

-- Take a key out of a namespace's index and sums.
local function drop_entry(key, index, lru, pinned, sizes, total, inline, recount)
  local place, counted = unpack(redis.call('HMGET', index, 'place', 'counted'))
  local size = tonumber(redis.call('HGET', sizes, key) or '0')
  add_bytes(0 - size, place, total, inline)
  if counted and counted == redis.call('HGET', recount, 'id') then
    add_counted(0 - size, place, total, inline, recount)
  end
  redis.call('HDEL', sizes, key)
  redis.call('DEL', index)
  redis.call('ZREM', lru, key)
  redis.call('ZREM', pinned, key)
end

-- Remove the oldest members of a sorted set until `most` are left, and the key of each: `prefix` and its name.
local function forget_oldest(members, most, prefix)
  while redis.call('ZCARD', members) > tonumber(most) do
    redis.call('DEL', prefix .. redis.call('ZPOPMIN', members)[1])
  end
end
