-- The time, and steps that several scripts share. storage/redis/scripts.py puts this before every script.
local clock = redis.call('TIME')
local microseconds = clock[1] * 1000000 + clock[2]
local now = math.floor(microseconds / 1000) -- ms since 1970

local function integer(number) -- as Redis takes it
  return string.format('%.0f', number)
end

-- A script that fails does not roll back: each checks its arguments, and what it adds to, before its first write.
-- tests/service/storage/test_lua_half_writes.py calls each with malformed ones.

-- Fail if arguments are missing: `fixed` ones, then groups of `size` each, at least `least` of them.
local function check_arguments(fixed, size, least)
  local more = #ARGV - fixed
  if more < (least or 0) * (size or 0) or (size and more % size ~= 0) then
    error('arguments are missing')
  end
end

local EXACT = 2 ^ 53 -- up to here Lua knows each whole number, and Redis takes it

-- A number to compare with, as a limit: of any size.
local function comparable(text)
  local number = tonumber(text)
  if not number or number ~= number then
    error('no number: ' .. tostring(text))
  end
  return number
end

-- A number that Redis can add.
local function finite(text)
  local number = comparable(text)
  if math.abs(number) > EXACT then
    error('no number to add: ' .. text)
  end
  return number
end

-- How many, or how long in ms: a whole number, `least` or more. Above EXACT one is as good as the other.
local function whole(text, least)
  local number = comparable(text)
  if number % 1 ~= 0 or number < least then
    error('no number from ' .. least .. ' on: ' .. text)
  end
  return math.min(number, EXACT)
end

-- A stored number, or `default` where there is none that can be added.
local function number_or(default, text)
  local ok, number = pcall(finite, text)
  return ok and number or default
end

-- Fail if INCRBY or HINCRBY could not add to one of these. false: it is not there.
local function check_counters(values)
  for _, value in ipairs(values) do
    if value and integer(finite(value)) ~= value then
      error('no number: ' .. value)
    end
  end
end

local DAY_MS, KEPT_DAYS = 86400000, 366

-- Add to a figure of this hour and of this day, which Keys.hours and Keys.days name. Where it cannot be added it is lost:
-- it must not keep an artifact from being served.
local function count_hour(stats, name, number)
  local day = math.floor(now / DAY_MS)
  local hour, command = math.floor(now % DAY_MS / 3600000), 'HINCRBY'
  if name:match('^seconds') then
    command = 'HINCRBYFLOAT'
  end
  for key, at in pairs({[stats .. ':hours:' .. day] = hour, [stats .. ':days:' .. math.floor(day / 32)] = day % 32}) do
    redis.pcall(command, key, at .. ':' .. name, number)
    redis.pcall('PEXPIRE', key, KEPT_DAYS * DAY_MS)
  end
end

-- Add to a counter: of all time, and of this hour. Seconds have a fraction.
local function count(stats, name, number)
  if number ~= 0 then
    local text = name:match('^seconds') and string.format('%.6f', number) or integer(number)
    redis.call(name:match('^seconds') and 'HINCRBYFLOAT' or 'HINCRBY', stats, name, text)
    count_hour(stats, name, text)
  end
end

-- Seconds that an entry of the index saves.
local function seconds_saved(text)
  return string.format('%.6f', number_or(0, text))
end

-- A lease's new fence. It is higher than all before, even if Redis has lost them: never below the clock.
local function next_fence(fence)
  local number = integer(math.max(number_or(0, redis.call('GET', fence)) + 1, microseconds))
  redis.call('SET', fence, number)
  return number
end

-- Who holds a lease, and under which fence: it is `owner:fence`. nil: nobody does.
local function holder_of(lease)
  return (redis.call('GET', lease) or ''):match('^(.*):(%d+)$')
end

-- Give `owner` a lease, or renew his. `open`: a sorted set; from the lease's end on another may take `member` of it.
-- Returns the fence.
local function hold(lease, fence, owner, ms, open, member)
  local holder, number = holder_of(lease)
  if holder ~= owner then
    number = next_fence(fence)
  end
  redis.call('SET', lease, owner .. ':' .. number, 'PX', ms)
  redis.call('ZADD', open, integer(now + ms), member)
  return number
end

-- Leave to others what was leased.
local function leave(lease, open, member)
  redis.call('DEL', lease)
  redis.call('ZADD', open, integer(now), member)
end

-- Append an event to a compile's stream. asker: who queued it. acquire.lua knows stage and asker by their places.
local function add_event(events, run, ttl_ms, stage, detail, failure, asker)
  local started = number_or(now, redis.call('HGET', run, 'started'))
  redis.call('XADD', events, 'MAXLEN', '~', 1000, '*', 'stage', stage,
    'seconds', string.format('%.3f', (now - started) / 1000), 'detail', detail, 'error', failure,
    'asker', asker or '')
  redis.call('PEXPIRE', events, ttl_ms)
end

-- Fail if the sums are none: before the first write of a script that adds an entry's size, or takes it from them.
local function check_sums(bytes, inline)
  check_counters(redis.call('MGET', bytes, inline))
end

-- Add an entry's size to the sums, or take it from them. They are Keys.sum_keys; `lru` names the namespace.
local function add_bytes(size, tier, lru, namespace_bytes, bytes, inline)
  redis.call('ZINCRBY', namespace_bytes, integer(size), lru)
  redis.call('INCRBY', bytes, integer(size))
  if tier == 'redis' then
    redis.call('INCRBY', inline, integer(size))
  end
end

-- Take a key out of a namespace's index and the sums.
local function drop_entry(key, index, lru, pinned, sizes, namespace_bytes, bytes, inline)
  local tier = redis.call('HGET', index, 'place')
  local size = number_or(0, redis.call('HGET', sizes, key))
  add_bytes(0 - size, tier, lru, namespace_bytes, bytes, inline)
  redis.call('HDEL', sizes, key)
  redis.call('DEL', index)
  redis.call('ZREM', lru, key)
  redis.call('ZREM', pinned, key)
end

-- Append an event to a job's stream, and to that of its series if it has one. It is a script's first write: Redis
-- refuses a number that is not above those of the stream.
local function add_job_event(job, number, name, data, series, whole_data)
  local id = integer(number) .. '-0'
  redis.call('XADD', job .. ':events', id, 'event', name, 'data', data)
  if series ~= '' then
    redis.call('XADD', job .. ':' .. series, id, 'data', whole_data)
  end
end

local function has_ended(state)
  return state == 'done' or state == 'failed' or state == 'cancelled'
end

-- Remove the oldest members of a sorted set until `most` are left, and the keys of each: each prefix and its name.
local function forget_oldest(members, most, ...)
  while redis.call('ZCARD', members) > most do
    local name = redis.call('ZPOPMIN', members)[1]
    for _, prefix in ipairs({...}) do
      redis.call('DEL', prefix .. name)
    end
  end
end
