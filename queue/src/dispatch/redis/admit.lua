-- Returns what waits: {entries, tokens, tokens drained per ms or -1 (as text), entries and tokens that only the
-- store has}, then for each priority {entries, tokens, active tenants, tokens of the first tenant in ARGV},
-- then the waiting tokens of each tenant in ARGV.
local known = redis.call('HMGET', META, 'n', 't', 'missing', 'missing_t')
local rate = drain_rate(now_ms())
local counts = {
  tonumber(known[1] or 0),
  tonumber(known[2] or 0),
  rate and string.format('%.6f', rate) or '-1',
  tonumber(known[3] or 0),
  tonumber(known[4] or 0),
}
local function add(value) counts[#counts + 1] = tonumber(value or 0) end
for _, priority in ipairs(PRIORITIES) do
  local waiting = redis.call('HMGET', META, 'n:' .. priority, 't:' .. priority)
  add(waiting[1])
  add(waiting[2])
  add(redis.call('ZCARD', P .. ':active:' .. priority))
  add(ARGV[1] and redis.call('HGET', COSTS, priority .. ':' .. ARGV[1]))
end
for _, tenant in ipairs(ARGV) do
  local waiting = 0
  for _, priority in ipairs(PRIORITIES) do
    waiting = waiting + tonumber(redis.call('HGET', COSTS, priority .. ':' .. tenant) or 0)
  end
  add(waiting)
end
return counts
