-- Parks entries that are still the consumer's, for whoever pulls next.
-- ARGV: consumer, then per entry: id place entry deliveries. Returns how many were.
local mine, total = fenced(ARGV[1])
for place, found in pairs(mine) do
  -- The count of deliveries stays: the next pull raises it.
  claim(place, found.entries, RETURNED)
  redis.call('HINCRBY', PARKED, place, #found.entries)
  count(place, #found.entries, found.tokens)
  activate(place)
end
if total > 0 then ring() end
return total
