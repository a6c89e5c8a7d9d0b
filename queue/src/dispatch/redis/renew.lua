-- Says that the consumer still works on entries, if they are its own.
-- ARGV: consumer, then per entry: id place entry. Returns the positions (from 0) of those lost.
local me, lost = ARGV[1], {}
for i = 2, #ARGV, 3 do
  local id, place, entry = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  if is_mine(id, place, entry, me) then
    redis.call('XCLAIM', stream_of(place), GROUP, me, 0, entry, 'JUSTID')
  else
    lost[#lost + 1] = (i - 2) / 3
  end
end
return lost
