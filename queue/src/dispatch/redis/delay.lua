-- Keeps entries until they are due.
-- ARGV: entries_max, then per entry: id place cost due_ms.
-- Returns how many are kept, or -1 if more than entries_max would be delayed. A job that waits or is
-- pending stays as it is; one that is already delayed gets the new time.
local fresh = 0
for i = 2, #ARGV, 4 do
  if redis.call('HEXISTS', IDS, ARGV[i]) == 0 then fresh = fresh + 1 end
end
if redis.call('ZCARD', DUE) + fresh > tonumber(ARGV[1]) then return -1 end
local kept = 0
for i = 2, #ARGV, 4 do
  local id = ARGV[i]
  if not located(id) and not in_front(id, redis.call('HGET', IDS, id)) then
    redis.call('HSET', IDS, id, '@' .. ARGV[i + 2] .. ':' .. ARGV[i + 1])
    redis.call('ZADD', DUE, ARGV[i + 3], id)
    kept = kept + 1
  end
end
if kept > 0 then ring(1) end
return kept
