-- Moves up to ARGV[1] due entries to their streams; returns how many it checked.
local ids = redis.call('ZRANGEBYSCORE', DUE, '-inf', now_ms(), 'LIMIT', 0, tonumber(ARGV[1]))
local moved = 0
for _, id in ipairs(ids) do
  redis.call('ZREM', DUE, id)
  local cost, place = (redis.call('HGET', IDS, id) or ''):match('^@(%d+):(.*)$')
  if cost then
    open(place)
    append(id, place, tonumber(cost))
    count(place, 1, tonumber(cost))
    activate(place)
    moved = moved + 1
  end
end
if moved > 0 then ring(moved) end
return #ids
