-- Give a dispatcher its share of a group of slots, and renew what it has; or take all from it.
-- KEYS: Keys.slot_keys. ARGV: dispatcher, lease ms (0: it leaves), number of the slots that there are, these, then the
-- slots that it uses, what it wants to keep most first.
-- Returns the slots that it may use. Of those that it uses and may not any more, each is its own until a call does not
-- list it. The share is the same for all, but for one slot more or less; nobody gives a slot up to have one less.
-- The lease is written when a slot changes its owner, or a quarter of it has passed: dispatchers call more often.
local slots, dispatchers, closed = unpack(KEYS)
local caller, lease_ms, count = ARGV[1], whole(ARGV[2], 0), whole(ARGV[3], 0)
check_arguments(3 + count)

local live, members, leased_until = {[caller] = true}, 1, nil
local known, expired = redis.call('ZRANGE', dispatchers, 0, -1, 'WITHSCORES'), false
for position = 1, #known, 2 do
  local each = known[position]
  if tonumber(known[position + 1]) > now then
    if each == caller then
      leased_until = tonumber(known[position + 1])
    else
      members = members + 1
    end
    live[each] = true
  else
    expired = true
  end
end

local owner, leaves, freed, stored, fields = {}, {}, {}, {}, redis.call('HGETALL', slots)
for position = 1, #fields, 2 do
  local slot, holder, mark = fields[position], fields[position + 1]:match('^(%w+)(-?)$')
  stored[slot] = fields[position + 1]
  leaves[slot] = mark == '-'
  if holder == caller or not live[holder] then
    freed[slot] = true
  else
    owner[slot] = holder
  end
end

local offered, others = {}, {}
for position = 4, 3 + count do
  local slot = ARGV[position]
  offered[slot] = true
  if owner[slot] and not leaves[slot] then
    others[owner[slot]] = (others[owner[slot]] or 0) + 1
  end
end
local least, larger = math.floor(count / members), count % members
local with_more = 0
for _, number in pairs(others) do
  with_more = with_more + (number > least and 1 or 0)
end
local share = least + (with_more < larger and 1 or 0)

local own, may_use = {}, {}
for position = 4 + count, #ARGV do
  local slot = ARGV[position]
  if offered[slot] and not owner[slot] then
    own[#own + 1] = slot
    owner[slot] = caller
    leaves[slot] = #may_use >= share
    if not leaves[slot] then
      may_use[#may_use + 1] = slot
    end
  end
end
-- Redis lost its memory, or did not answer for a while: others may use slots, too, and have not said so yet.
local returns = not leased_until and #own > 0
if not returns and #own < share and redis.call('EXISTS', closed) == 0 then
  for position = 4, 3 + count do
    local slot = ARGV[position]
    if #own < share and not owner[slot] then
      own[#own + 1] = slot
      may_use[#may_use + 1] = slot
      owner[slot], leaves[slot] = caller, false
    end
  end
end

local renews = not leased_until or leased_until - now < lease_ms * 3 / 4
for slot in pairs(freed) do
  if lease_ms == 0 or owner[slot] ~= caller then
    redis.call('HDEL', slots, slot)
  end
end
if expired then
  redis.call('ZREMRANGEBYSCORE', dispatchers, '-inf', integer(now))
end
if lease_ms == 0 then
  redis.call('ZREM', dispatchers, caller)
  return {}
end
for _, slot in ipairs(own) do
  local value = caller .. (leaves[slot] and '-' or '')
  if stored[slot] ~= value then
    redis.call('HSET', slots, slot, value)
    renews = true
  end
end
if renews then
  redis.call('ZADD', dispatchers, integer(now + lease_ms), caller)
  redis.call('PEXPIRE', slots, lease_ms)
  redis.call('PEXPIRE', dispatchers, lease_ms)
end
if returns then
  redis.call('SET', closed, '1', 'PX', lease_ms)
end
return may_use
