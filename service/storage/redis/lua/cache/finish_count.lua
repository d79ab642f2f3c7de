-- Put the sums that count_entries.lua has found in the place of those that there are.
-- KEYS: recount, inline. ARGV: the count's id. Returns name, old and new value of each sum that was wrong, or nil if
-- another count has begun since.
local recount, inline, id = KEYS[1], KEYS[2], ARGV[1]
if redis.call('HGET', recount, 'id') ~= id then
  return false
end
local found, wrong = redis.call('HGETALL', recount), {}
for i = 1, #found, 2 do
  if found[i] ~= 'id' then
    finite(found[i + 1])
  end
end
local bytes, held = sums_of_all(inline)
local all = 0
redis.call('DEL', held)
for i = 1, #found, 2 do
  local sum, counted = found[i], found[i + 1]
  local was = sum ~= 'id' and (redis.call('GET', sum) or '0')
  if was and was ~= counted then
    redis.call('SET', sum, counted)
    for _, part in ipairs({sum, was, counted}) do
      wrong[#wrong + 1] = part
    end
  end
  if was and sum ~= inline then
    all = all + counted
    redis.call('ZADD', held, counted, sum)
  end
end
redis.call('SET', bytes, integer(all))
redis.call('DEL', recount)
return wrong
