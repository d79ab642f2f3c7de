-- Replace sums that are wrong, unless they have changed since they were counted.
-- KEYS: Keys.sum_keys. ARGV, of each sum: its name, which is that of its `lru` for a namespace; what it was before the
-- count; what was counted.
-- Returns {1 if one has changed, else 0, name, old and new value of each that was replaced ...}.
local namespace_bytes, bytes, inline = unpack(KEYS)
check_arguments(0, 3, 1)
for i = 3, #ARGV, 3 do
  finite(ARGV[i])
end
local out = {0}
for i = 1, #ARGV, 3 do
  local name, was, counted = unpack(ARGV, i, i + 2)
  local of_all = name == bytes or name == inline
  local current
  if of_all then
    current = redis.call('GET', name) or '0'
  else
    current = redis.call('ZSCORE', namespace_bytes, name) or '0'
  end
  local number = number_or(nil, current)
  if number ~= number_or(nil, was) then
    out[1] = 1
  elseif number ~= tonumber(counted) then
    if of_all then
      redis.call('SET', name, integer(counted))
    else
      redis.call('ZADD', namespace_bytes, integer(counted), name)
    end
    for _, part in ipairs({name, current, counted}) do
      out[#out + 1] = part
    end
  end
end
return out
