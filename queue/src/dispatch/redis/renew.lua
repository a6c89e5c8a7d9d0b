-- Resets the idle time of entries that still belong to the consumer.
-- ARGV: consumer, then per entry: id place entry deliveries. Returns the positions (from 0) of the
-- others.
local mine, _, lost = fenced(ARGV[1])
for place, found in pairs(mine) do claim(place, found.entries, ARGV[1]) end
table.sort(lost)
return lost
