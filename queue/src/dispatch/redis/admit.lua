-- Returns what counts towards the limits: {entries, tokens, tokens drained per ms or -1 (as text), then the
-- waiting tokens of each tenant in ARGV}. Entries and tokens include what only the store has.
local known = redis.call('HMGET', META, 'n', 't', 'missing', 'missing_t')
local rate = drain_rate(now_ms())
local counts = {
  tonumber(known[1] or 0) + tonumber(known[3] or 0),
  tonumber(known[2] or 0) + tonumber(known[4] or 0),
  rate and string.format('%.6f', rate) or '-1',
}
for i, tenant in ipairs(ARGV) do
  local waiting = 0
  for _, priority in ipairs(PRIORITIES) do
    waiting = waiting + tonumber(redis.call('HGET', COSTS, priority .. ':' .. tenant) or 0)
  end
  counts[3 + i] = waiting
end
return counts
