--[[
  Removes entries that still belong to the consumer.

  ARGV[1]   consumer
  ARGV[2…]  four for each entry: job, place, entry, number of deliveries

  Returns {number of entries removed, number of foreign entries dropped}
]]
local consumer = ARGV[1]

local owned, total = owned_entries(consumer)
local tokens, foreign = 0, 0
for place, of_place in pairs(owned) do
  redis.call('XACK', stream_key(place), GROUP, unpack(of_place.entries))
  redis.call('XDEL', stream_key(place), unpack(of_place.entries))
  redis.call('HDEL', locations_key, unpack(of_place.ids))
  tokens = tokens + of_place.tokens
  foreign = foreign + close_stream(place)
end
if total > 0 then add_drained(tokens) end
return { total, foreign }
