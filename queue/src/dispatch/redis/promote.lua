--[[
  Moves due entries to their streams.

  ARGV[1]  most entries to check

  Returns how many it checked
]]
local entries_max = tonumber(ARGV[1])

local ids = redis.call('ZRANGEBYSCORE', due_key, '-inf', now_ms(), 'LIMIT', 0, entries_max)
local moved = 0
for _, id in ipairs(ids) do
  redis.call('ZREM', due_key, id)
  local cost, place = (redis.call('HGET', locations_key, id) or ''):match('^@(%d+):(.*)$')
  if cost then
    open_stream(place)
    append_entry(id, place, tonumber(cost))
    add_waiting(place, 1, tonumber(cost))
    activate(place)
    moved = moved + 1
  end
end
if moved > 0 then wake(moved) end
return #ids
