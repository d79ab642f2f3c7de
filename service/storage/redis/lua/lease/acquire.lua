-- Answer a request for a key that is not cached: take the lease, join who holds it, or say why not.
-- KEYS: index, failed, lease, fence, active, events, request, run, waiters, stats, namespaces, spent.
-- ARGV: key, owner, lease ms, most queued, request body, ttl ms, finish '1' or '0', 'ask' or 'takeover',
--       wake channel, abandon ms, prefix, default namespace, namespace,
--       compiles at once and compile seconds in a period of a namespace that has no quota of its own (0: no limit).
-- Returns {'hit'}, {'failed', error JSON}, {'wait'}, {'gone'}, {'lease', fence, body},
--         {'overloaded', how many are queued, 'all' or 'share'}, {'compiles', limit} or
--         {'seconds', limit, ms until the period ends}.
local asking = ARGV[8] == 'ask'

local function count(field)
  if asking then
    redis.call('HINCRBY', KEYS[10], 'requests', 1)
    redis.call('HINCRBY', KEYS[10], field, 1)
  end
end

if redis.call('EXISTS', KEYS[1]) == 1 then
  return {'hit'}
end
local failed = redis.call('GET', KEYS[2])
if failed then
  count('refused')
  return {'failed', failed}
end

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function want()
  if ARGV[7] == '1' then
    redis.call('HSET', KEYS[8], 'finish', '1')
  elseif asking then
    redis.call('ZADD', KEYS[9], string.format('%.0f', now + ARGV[10]), ARGV[2])
    redis.call('PEXPIRE', KEYS[9], ARGV[6])
  end
end

local lease = redis.call('GET', KEYS[3])
if lease then
  local owner, fence = lease:match('^(.*):(%d+)$')
  if owner == ARGV[2] then
    return {'lease', fence, ARGV[5]} -- the same call again, after a lost answer
  end
  if asking then
    redis.call('HINCRBY', KEYS[8], 'joins', 1)
    want()
  end
  count('coalesced')
  return {'wait'}
end

local last = redis.call('XREVRANGE', KEYS[6], '+', '-', 'COUNT', 1)[1]
local stage = nil
if last then
  for i = 1, #last[2], 2 do
    if last[2][i] == 'stage' then
      stage = last[2][i + 1]
    end
  end
end
local running = stage ~= nil and stage ~= 'done' and stage ~= 'failed'
local body = ARGV[5]
if not asking then
  body = redis.call('GET', KEYS[7])
  if not body or not running then
    return {'gone'}
  end
end

redis.call('ZREMRANGEBYSCORE', KEYS[5], '-inf', string.format('%.0f', now))

-- At overload each namespace keeps its share: it holds at most twice as many places as are free for anybody
-- (dynamic thresholds, Choudhury and Hahne 1998). One that floods alone gets two thirds, n that do get two of
-- 2n + 1 parts each, and whoever comes next finds the last part free.
local function refusal()
  local quota = cjson.decode(redis.call('HGET', KEYS[11], ARGV[13]) or '{}')
  local own = redis.call('ZCARD', KEYS[5])
  local most = quota.compiles or tonumber(ARGV[14])
  if most > 0 and own >= most then
    return {'compiles', tostring(most)}
  end
  local seconds = quota.compile_seconds or tonumber(ARGV[15])
  if seconds > 0 and tonumber(redis.call('GET', KEYS[12]) or '0') >= seconds * 1000 then
    return {'seconds', tostring(seconds), redis.call('PTTL', KEYS[12])}
  end
  local queued, others = own, 0
  local names = redis.call('HKEYS', KEYS[11])
  names[#names + 1] = redis.call('HEXISTS', KEYS[11], ARGV[12]) == 0 and ARGV[12] or nil
  for _, name in ipairs(names) do
    if name ~= ARGV[13] then
      local active = (name == ARGV[12] and ARGV[11] or ARGV[11] .. 'ns:' .. name .. ':') .. 'active'
      queued = queued + redis.call('ZCOUNT', active, string.format('(%.0f', now), '+inf')
      others = others + 1
    end
  end
  local free = tonumber(ARGV[4]) - queued
  if free <= 0 then
    return {'overloaded', queued, 'all'}
  end
  if others > 0 and own >= 2 * free then
    return {'overloaded', own, 'share'}
  end
  return nil
end

local refused = asking and not running and refusal() or nil
if refused then
  count(refused[1] == 'overloaded' and 'overloaded' or 'over_quota')
  return refused
end

-- Fences grow even when Redis comes back empty: never below the clock, in microseconds.
local fence = tonumber(redis.call('GET', KEYS[4]) or '0') + 1
local clock = time[1] * 1000000 + time[2]
if fence < clock then
  fence = clock
end
fence = string.format('%.0f', fence)
redis.call('SET', KEYS[4], fence)
redis.call('SET', KEYS[3], ARGV[2] .. ':' .. fence, 'PX', ARGV[3])
redis.call('ZADD', KEYS[5], string.format('%.0f', now + ARGV[3]), ARGV[1])
redis.call('SET', KEYS[7], body, 'PX', ARGV[6])
local detail = 'taken over from a holder that died'
if not running then
  detail = ''
  redis.call('DEL', KEYS[6], KEYS[8], KEYS[9])
  redis.call('HSET', KEYS[8], 'started', string.format('%.0f', now), 'joins', 0)
end
want()
redis.call('PEXPIRE', KEYS[8], ARGV[6])
local started = tonumber(redis.call('HGET', KEYS[8], 'started') or now)
redis.call('XADD', KEYS[6], '*', 'stage', 'queued', 'seconds', string.format('%.3f', (now - started) / 1000),
  'detail', detail, 'error', '')
redis.call('PEXPIRE', KEYS[6], ARGV[6])
redis.call('PUBLISH', ARGV[9], ARGV[1])
count('misses')
return {'lease', fence, body}
