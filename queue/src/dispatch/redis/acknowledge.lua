-- Forgets entries that are still the consumer's.
-- ARGV: consumer, then per entry: id place entry. Returns {how many were, foreign entries dropped}.
local me, mine, tokens, foreign, places = ARGV[1], 0, 0, 0, {}
for i = 2, #ARGV, 3 do
  local id, place, entry = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  if is_mine(id, place, entry, me) then
    local _, cost = located(id)
    drop(place, entry)
    redis.call('HDEL', IDS, id)
    mine, tokens = mine + 1, tokens + cost
    places[place] = true
  end
end
for place in pairs(places) do foreign = foreign + close(place) end
if mine > 0 then drained(tokens) end
return { mine, foreign }
