--[[
  Resets the idle time of entries that still belong to the consumer.

  ARGV[1]   consumer
  ARGV[2…]  four for each entry: job, place, entry, number of deliveries

  Returns the positions of the other entries, from 0
]]
local consumer = ARGV[1]

local owned, _, lost = owned_entries(consumer)
for place, of_place in pairs(owned) do assign(place, of_place.entries, consumer) end
table.sort(lost)
return lost
