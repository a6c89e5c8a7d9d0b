-- Removes entries that still belong to the consumer.
-- ARGV: consumer, then per entry: id place entry deliveries. Returns {number removed, foreign entries
-- dropped}.
local mine, total = fenced(ARGV[1])
local tokens, foreign = 0, 0
for place, found in pairs(mine) do
  redis.call('XACK', stream_of(place), GROUP, unpack(found.entries))
  redis.call('XDEL', stream_of(place), unpack(found.entries))
  redis.call('HDEL', IDS, unpack(found.ids))
  tokens = tokens + found.tokens
  foreign = foreign + close(place)
end
if total > 0 then drained(tokens) end
return { total, foreign }
