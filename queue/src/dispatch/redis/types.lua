--[[
  Looks for keys of the queue that another program has given another type. Looks at no more than ARGV[1] tenants.

  ARGV[2...]  places to look at in any case

  Returns a description of the first one, or nothing
]]
local tenants_max = tonumber(ARGV[1])

local function wrong(key, expected)
  local found = redis.pcall('TYPE', key)
  -- The user may not be allowed to ask.
  if found.err or found.ok == expected or found.ok == 'none' then return nil end
  return 'the key ' .. key .. ' is a ' .. found.ok .. ', not a ' .. expected
end

local checks = {
  { meta_key, 'hash' }, { locations_key, 'hash' }, { streams_key, 'set' }, { waiting_entries_key, 'hash' },
  { waiting_tokens_key, 'hash' }, { returned_key, 'hash' }, { due_key, 'zset' }, { wakeups_key, 'list' },
}
for _, priority in ipairs(PRIORITIES) do
  checks[#checks + 1] = { active_key(priority), 'zset' }
  checks[#checks + 1] = { owed_key(priority), 'zset' }
end
for _, check in ipairs(checks) do
  local found = wrong(check[1], check[2])
  if found then return found end
end
local places = redis.call('SSCAN', streams_key, 0, 'COUNT', tenants_max)[2]
for i = 2, #ARGV do places[#places + 1] = ARGV[i] end
for _, place in ipairs(places) do
  local found = wrong(stream_key(place), 'stream') or wrong(front_key(place), 'zset')
  if found then return found end
end
return nil
