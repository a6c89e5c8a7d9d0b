-- Parks entries that are still the consumer's, for whoever pulls next.
-- ARGV: consumer, then per entry: id place entry. Returns how many were.
local me, mine = ARGV[1], 0
for i = 2, #ARGV, 3 do
  local id, place, entry = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  if is_mine(id, place, entry, me) then
    -- JUSTID leaves the delivery count alone: the next pull raises it.
    redis.call('XCLAIM', stream_of(place), GROUP, RETURNED, 0, entry, 'JUSTID')
    local _, cost = located(id)
    redis.call('HINCRBY', PARKED, place, 1)
    count(place, 1, cost)
    activate(place)
    mine = mine + 1
  end
end
if mine > 0 then ring() end
return mine
