--[[
  Keeps entries until they are due. A job that waits or is pending stays as it is; one that is already delayed gets the
  new time.

  ARGV[1]   most entries that may be delayed
  ARGV[2…]  four for each entry: job, place, cost, due time in ms

  Returns the number of entries kept, or -1 if too many would be delayed
]]
local delayed_max = tonumber(ARGV[1])

local unknown = 0
for i = 2, #ARGV, 4 do
  if redis.call('HEXISTS', locations_key, ARGV[i]) == 0 then unknown = unknown + 1 end
end
if redis.call('ZCARD', due_key) + unknown > delayed_max then return -1 end
local kept = 0
for i = 2, #ARGV, 4 do
  local id, place, cost, due_ms = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]
  if not entry_of(id) and not is_in_front(id, redis.call('HGET', locations_key, id)) then
    redis.call('HSET', locations_key, id, '@' .. cost .. ':' .. place)
    redis.call('ZADD', due_key, due_ms, id)
    kept = kept + 1
  end
end
if kept > 0 then wake(1) end
return kept
