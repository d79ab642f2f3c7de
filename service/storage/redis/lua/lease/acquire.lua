-- Answer a request for a key that is not cached: queue its compile, join its holder, or refuse; or take its lease. Who
-- asks without the body is told if it is needed; then only the time of that is noted.
-- KEYS: Keys.compile_keys. mode: 'queue': for any dispatcher; 'take': take the lease of a compile that is queued, or
-- whose holder died. needs: CompileNeeds, for dispatchers. most_compiles,
-- most_seconds: limits of a namespace without its own quota (0: no limit). trace: the caller's span. priority: see
-- single_flight.Priority; 0: a person waits. Jobs hold at most half of the queue, and what they have in it counts as
-- their namespace's only once it is taken.
-- Returns {'hit'}, {'failed', error JSON}, {'wait'}, {'gone'}, {'body'}, {'later'}, {'queued'},
--         {'lease', fence, body, how often it was taken, ms since it was queued, wanted 1 or 0,
--          trace of whoever asked first, needs, how many workers died of it},
--         {'overloaded', how many are queued, 'all' or 'share'}, {'overloaded', bytes of their requests, 'bytes'},
--         {'compiles', limit} or
--         {'seconds', limit, ms until the period ends}.
local index, lease, fence, active, events, request, run, waiters, failed, stats, spent, namespaces, _, pending, body_bytes,
  priorities = unpack(KEYS)
local key, owner, lease_ms, ttl_ms, wake, abandon_ms, body, needs, mode = unpack(ARGV)
local compiles_wait, most_queued, namespace, default, most_compiles, most_seconds, trace, most_bytes, priority = unpack(
  ARGV, 10)
check_arguments(18)
lease_ms, ttl_ms, abandon_ms = whole(lease_ms, 1), whole(ttl_ms, 1), whole(abandon_ms, 0)
most_queued, most_bytes = comparable(most_queued), comparable(most_bytes)
most_compiles, most_seconds = comparable(most_compiles), comparable(most_seconds)
priority = whole(priority, 0)
local asking = mode == 'queue'

local SENDING_MS = 500 -- who has not sent the body by then has gone away

local function count_request(field)
  if asking then
    count(stats, 'requests', 1)
    count(stats, field, 1)
  end
end

local first = asking and redis.call('XRANGE', events, '-', '+', 'COUNT', 1)[1]
if first and first[2][#first[2]] == owner then -- the same call again, after a lost answer
  return {'queued'}
end
if redis.call('EXISTS', index) == 1 then
  return {'hit'}
end
check_counters(redis.call('HMGET', run, 'joins', 'leases'))
local standing = number_or(0, redis.call('HGET', priorities, lease))
check_counters(redis.call('HMGET', stats, 'requests', 'refused', 'coalesced', 'overloaded', 'over_quota', 'misses'))
local failure = asking and redis.call('GET', failed) -- what is queued was not refused
if failure then
  count_request('refused')
  return {'failed', failure}
end

local function want() -- what a person asked for is finished, whoever waits
  if asking and priority == 0 then
    redis.call('HSET', run, 'finish', '1')
  elseif asking then
    redis.call('ZADD', waiters, integer(now + abandon_ms), owner)
    redis.call('PEXPIRE', waiters, ttl_ms)
  end
end

local function prioritize()
  if priority > 0 then
    redis.call('HSET', priorities, lease, integer(priority))
  else
    redis.call('HDEL', priorities, lease)
  end
end

local holder, held_fence = holder_of(lease)
if holder then
  if holder == owner then -- the same call again, after a lost answer
    return {'lease', held_fence, redis.call('GET', request) or '', 1, 0, 1, redis.call('HGET', run, 'trace') or '',
      redis.call('HGET', run, 'needs') or needs, redis.call('HGET', run, 'killed') or 0}
  end
  if asking then
    redis.call('HINCRBY', run, 'joins', 1)
    want()
    if priority < standing then
      prioritize()
    end
  end
  count_request('coalesced')
  return {'wait'}
end

local last = redis.call('XREVRANGE', events, '+', '-', 'COUNT', 1)[1]
local stage = last and last[2][2]
local running = stage and stage ~= 'done' and stage ~= 'failed'
if not asking then
  body = redis.call('GET', request)
  if not body or not running then
    redis.call('ZREM', pending, lease)
    redis.call('ZREM', active, key)
    return {'gone'}
  end
elseif running and redis.call('ZSCORE', pending, lease) and redis.call('EXISTS', request) == 1 then
  redis.call('HINCRBY', run, 'joins', 1)
  want()
  if priority < standing then
    prioritize()
    if priority == 0 then -- from here on it waits for a person
      redis.call('HSET', run, 'started', integer(now))
      redis.call('ZADD', active, integer(now + ttl_ms), key)
      redis.call('ZADD', pending, integer(now), lease)
    end
  end
  count_request('coalesced')
  return {'wait'}
end

local limited = asking and not running
local quota = cjson.decode(redis.call('HGET', namespaces, namespace) or '{}')
most_compiles = comparable(quota.compiles or most_compiles)
most_seconds = comparable(quota.compile_seconds or most_seconds)
if limited and priority > 0 then
  most_queued, most_bytes = math.ceil(most_queued / 2), math.max(most_bytes / 2, #body)
end
redis.call('ZREMRANGEBYSCORE', active, '-inf', integer(now))
redis.call('ZREMRANGEBYSCORE', pending, '-inf', integer(now - ttl_ms))

-- At overload each namespace keeps its share: it holds at most twice as many places as are free for anybody
-- (dynamic thresholds, Choudhury and Hahne 1998). One that floods alone gets two thirds; n that flood get two of
-- 2n + 1 parts each, and the next one finds the last part free.
local function held_bytes()
  local all, own = 0, 0
  local mine = lease:sub(1, #lease - #key)
  local found = redis.call('HGETALL', body_bytes)
  for i = 1, #found, 2 do
    if redis.call('ZSCORE', pending, found[i]) then
      local size = number_or(0, found[i + 1])
      all = all + size
      own = own + (found[i]:sub(1, #mine) == mine and size or 0)
    else
      redis.call('HDEL', body_bytes, found[i])
      redis.call('HDEL', priorities, found[i])
    end
  end
  return all, own
end

local own = redis.call('ZCARD', active)
local at_quota = most_compiles > 0 and own >= most_compiles
local function refusal()
  if at_quota then
    return {'compiles', tostring(most_compiles)}
  end
  if most_seconds > 0 and number_or(0, redis.call('GET', spent)) >= most_seconds * 1000 then
    return {'seconds', tostring(most_seconds), redis.call('PTTL', spent)}
  end
  local queued = redis.call('ZCARD', pending)
  local others = redis.call('HLEN', namespaces) - redis.call('HEXISTS', namespaces, default)
  local free = most_queued - queued
  if free <= 0 then
    return {'overloaded', queued, 'all'}
  end
  if others > 0 and own >= 2 * free then
    return {'overloaded', own, 'share'}
  end
  local bytes, own_bytes = held_bytes()
  local free_bytes = most_bytes - bytes
  if #body > free_bytes or (others > 0 and own_bytes + #body > 2 * free_bytes) then
    return {'overloaded', integer(bytes), 'bytes'}
  end
  return nil
end

local refused = limited and refusal() or nil
if refused then
  count_request(refused[1] == 'overloaded' and 'overloaded' or 'over_quota')
  return refused
end
if not asking and standing > 0 and at_quota then
  return {'wait'}
end

if body == '' then
  -- of those who queue at one time one sends the body; the others ask again, and soon find the compile queued
  local sending = redis.call('HGET', run, 'sending')
  if sending and now - number_or(0, sending) < SENDING_MS then
    return {'later'}
  end
  redis.call('HSET', run, 'sending', integer(now))
  redis.call('PEXPIRE', run, ttl_ms)
  return {'body'}
end
local wanted = 1
if not running then
  redis.call('DEL', events, run, waiters)
  redis.call('HSET', run, 'started', integer(now), 'joins', 0, 'trace', trace)
elseif not asking then
  redis.call('ZREMRANGEBYSCORE', waiters, '-inf', integer(now))
  wanted = (redis.call('HGET', run, 'finish') == '1' or redis.call('ZCARD', waiters) > 0) and 1 or 0
end
redis.call('SET', request, body, 'PX', ttl_ms)
redis.call('HSET', body_bytes, lease, #body)
if asking then
  redis.call('HSET', run, 'needs', needs)
else -- a dispatcher may remember what an earlier request with this key was
  needs = redis.call('HGET', run, 'needs') or needs
end
want()
local function report(detail)
  add_event(events, run, ttl_ms, 'queued', detail, '', asking and owner)
  redis.call('PUBLISH', wake, key)
end
if asking then
  redis.call('PEXPIRE', run, ttl_ms)
  prioritize()
  if priority == 0 then
    redis.call('ZADD', active, integer(now + ttl_ms), key)
  end
  redis.call('ZADD', pending, integer(now), lease)
  report('')
  redis.call('PUBLISH', wake, compiles_wait)
  count_request('misses')
  return {'queued'}
end
local number = hold(lease, fence, owner, lease_ms, pending, lease)
if standing > 0 then -- a job waits as long as it has to: the deadline counts from here
  redis.call('HSET', run, 'started', integer(now))
end
redis.call('ZADD', active, integer(now + lease_ms), key)
local times = redis.call('HINCRBY', run, 'leases', 1)
redis.call('PEXPIRE', run, ttl_ms)
if times > 1 then
  report('taken over from a holder that died')
end
local waited = now - number_or(now, redis.call('HGET', run, 'started'))
return {'lease', number, body, times, waited, wanted, redis.call('HGET', run, 'trace') or '', needs,
  redis.call('HGET', run, 'killed') or 0}
