-- Note a file of a training job that is in the blob store, or check whether the job may have it.
-- KEYS: job, files. ARGV: name, TrainFile JSON or '' to check, bytes, most files, most bytes of all.
-- Returns 'ok', 'gone' (no such job), 'many' or 'large'.
if redis.call('EXISTS', KEYS[1]) == 0 then
  return 'gone'
end
local count, sum = 1, tonumber(ARGV[3])
local files = redis.call('HGETALL', KEYS[2])
for at = 1, #files, 2 do
  if files[at] ~= ARGV[1] then
    count = count + 1
    sum = sum + cjson.decode(files[at + 1]).bytes
  end
end
if count > tonumber(ARGV[4]) then
  return 'many'
end
if sum > tonumber(ARGV[5]) then
  return 'large'
end
if ARGV[2] ~= '' then
  redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
end
return 'ok'
