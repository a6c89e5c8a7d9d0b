--[[
  Tells what waits, without changing anything.

  ARGV[1…]  the tenants of a submission

  Returns one list: waiting entries, waiting tokens, tokens drained per ms (as text, -1 if unknown), entries and tokens
  that only the store has; then for each priority its entries, tokens, active tenants and tokens of the first tenant;
  then the waiting tokens of each tenant
]]
local tenants = ARGV

local function tokens_of(priority, tenant)
  return tonumber(redis.call('HGET', waiting_tokens_key, priority .. ':' .. tenant) or 0)
end

local waiting = redis.call('HMGET', meta_key, 'entries', 'tokens', 'missing_entries', 'missing_tokens')
local rate = drain_rate(now_ms())
local counts = {
  tonumber(waiting[1] or 0),
  tonumber(waiting[2] or 0),
  rate and string.format('%.6f', rate) or '-1',
  tonumber(waiting[3] or 0),
  tonumber(waiting[4] or 0),
}
local function add(count) counts[#counts + 1] = count end
for _, priority in ipairs(PRIORITIES) do
  local of_priority = redis.call('HMGET', meta_key, 'entries:' .. priority, 'tokens:' .. priority)
  add(tonumber(of_priority[1] or 0))
  add(tonumber(of_priority[2] or 0))
  add(redis.call('ZCARD', active_key(priority)))
  add(tenants[1] and tokens_of(priority, tenants[1]) or 0)
end
for _, tenant in ipairs(tenants) do
  local tokens = 0
  for _, priority in ipairs(PRIORITIES) do tokens = tokens + tokens_of(priority, tenant) end
  add(tokens)
end
return counts
