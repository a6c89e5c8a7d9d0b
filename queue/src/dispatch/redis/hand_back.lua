--[[
  Hands entries back that still belong to the consumer: the next pull takes them before others.

  ARGV[1]   consumer
  ARGV[2…]  four for each entry: job, place, entry, number of deliveries

  Returns the number of entries handed back
]]
local consumer = ARGV[1]

local owned, total = owned_entries(consumer)
for place, of_place in pairs(owned) do
  -- Keeps the number of deliveries; the next pull increments it.
  assign(place, of_place.entries, RETURNED_CONSUMER)
  redis.call('HINCRBY', returned_key, place, #of_place.entries)
  add_waiting(base_place(place), #of_place.entries, of_place.tokens)
  activate(base_place(place))
end
if total > 0 then wake(total) end
return total
