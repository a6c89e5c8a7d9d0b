-- Checks whether there is room.
-- ARGV: entries_max tokens_max entries tokens, then per tenant with a quota: tenant tokens quota.
-- Returns {0, 0}, or {limit that would be exceeded (1 entries, 2 tokens, 2 + n the nth tenant's),
-- retry_after in ms}.
local entries, tokens = tonumber(ARGV[3]), tonumber(ARGV[4])
-- A single entry always fits an empty queue: otherwise a large one would never be accepted.
if entries == 0 then return { 0, 0 } end
local known = redis.call('HMGET', META, 'n', 'missing')
if entries == 1 and tonumber(known[1] or 0) + tonumber(known[2] or 0) <= 0 then return { 0, 0 } end
local which, after = excess(entries, tokens, tonumber(ARGV[1]), tonumber(ARGV[2]))
if which then return { which, after } end
for i = 5, #ARGV, 3 do
  local waiting = 0
  for _, priority in ipairs(PRIORITIES) do
    waiting = waiting + tonumber(redis.call('HGET', COSTS, priority .. ':' .. ARGV[i]) or 0)
  end
  local beyond = waiting + tonumber(ARGV[i + 1]) - tonumber(ARGV[i + 2])
  if beyond > 0 and (entries > 1 or waiting > 0) then return { 3 + (i - 5) / 3, wait_for(beyond) } end
end
return { 0, 0 }
