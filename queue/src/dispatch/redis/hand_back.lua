-- Parks entries that still belong to the consumer, for the next pull.
-- ARGV: consumer, then per entry: id place entry deliveries. Returns their number.
local mine, total = fenced(ARGV[1])
for place, found in pairs(mine) do
  -- Keeps the number of deliveries; the next pull increments it.
  claim(place, found.entries, RETURNED)
  redis.call('HINCRBY', PARKED, parked_of(place), #found.entries)
  count(base_of(place), #found.entries, found.tokens)
  activate(base_of(place))
end
if total > 0 then ring(total) end
return total
