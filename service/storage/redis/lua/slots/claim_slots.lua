-- Give a dispatcher its share of a group of slots, and renew what it has; or take all from it.
-- KEYS: Keys.slot_keys. ARGV: dispatcher, lease ms (0: it leaves), number of the slots that there are, these, then the
-- slots that it uses, what it wants to keep most first.
-- Returns the slots that it may use. Of those that it uses and may not any more, each is its own until a call does not
-- list it. The share is the same for all, but for one slot more or less; nobody gives a slot up to have one less.
-- The lease is written when a slot changes its owner, or a quarter of it has passed: dispatchers call more often.
local slots, dispatchers, closed = unpack(KEYS)
local caller, lease_ms, count = ARGV[1], whole(ARGV[2], 0), whole(ARGV[3], 0)
check_arguments(3 + count)

local others, members = {}, 1 -- who else lives, and how many are all
local leased_until = nil
local live = redis.call('ZRANGE', dispatchers, integer(now + 1), '+inf', 'BYSCORE', 'WITHSCORES')
for position = 1, #live, 2 do
  if live[position] == caller then
    leased_until = tonumber(live[position + 1])
  else
    others[live[position]], members = 0, members + 1
  end
end

local owner, leaves, stored, fields = {}, {}, {}, redis.call('HGETALL', slots)
for position = 1, #fields, 2 do
  local slot, holder, mark = fields[position], fields[position + 1]:match('^(%w+)(-?)$')
  stored[slot] = fields[position + 1]
  if others[holder] then
    owner[slot], leaves[slot] = holder, mark == '-'
  end
end

local offered = {}
for position = 4, 3 + count do
  local slot = ARGV[position]
  offered[slot] = true
  if owner[slot] and not leaves[slot] then
    others[owner[slot]] = others[owner[slot]] + 1
  end
end
local least, larger = math.floor(count / members), count % members
for _, number in pairs(others) do
  larger = larger - (number > least and 1 or 0)
end
local share = least + (larger > 0 and 1 or 0)

local own, own_count, may_use = {}, 0, {}
local function give(slot, leaving)
  owner[slot], own[slot], own_count = caller, caller .. (leaving and '-' or ''), own_count + 1
  if not leaving then
    may_use[#may_use + 1] = slot
  end
end
for position = 4 + count, #ARGV do
  local slot = ARGV[position]
  if offered[slot] and not owner[slot] then
    give(slot, #may_use >= share)
  end
end
-- Redis lost its memory, or did not answer for a while: others may use slots, too, and have not said so yet.
local returns = not leased_until and own_count > 0
if not returns and own_count < share and redis.call('EXISTS', closed) == 0 then
  for position = 4, 3 + count do
    if own_count < share and not owner[ARGV[position]] then
      give(ARGV[position], false)
    end
  end
end

for slot in pairs(stored) do
  if not owner[slot] then
    redis.call('HDEL', slots, slot)
  end
end
if lease_ms == 0 then
  redis.call('ZREM', dispatchers, caller)
  return {}
end
local renews = not leased_until or leased_until - now < lease_ms * 3 / 4
for slot, value in pairs(own) do
  if stored[slot] ~= value then
    redis.call('HSET', slots, slot, value)
    renews = true
  end
end
if renews then
  redis.call('ZREMRANGEBYSCORE', dispatchers, '-inf', integer(now))
  redis.call('ZADD', dispatchers, integer(now + lease_ms), caller)
  redis.call('PEXPIRE', slots, lease_ms)
  redis.call('PEXPIRE', dispatchers, lease_ms)
end
if returns then
  redis.call('SET', closed, '1', 'PX', lease_ms)
end
return may_use
