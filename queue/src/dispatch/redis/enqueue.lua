-- Adds entries, all or none.
-- ARGV: entries_max tokens_max entries_after tokens_after mode, then per entry: id place cost.
-- entries_after and tokens_after come in later calls and must fit too. Modes: new; checked (the limits were
-- checked before); again (requeued: in front, and only up to twice entries_max, which bounds Redis's memory).
-- Returns {added, 0, 0}, or {-1, exceeded limit (1 entries, 2 tokens), retry_after in ms}.
local FIRST = 6

-- Whether the job is in front, or its entry is fresh or pending at its place in IDS. An entry that another program
-- deleted, or acknowledged without deleting, is not live: adding it again repairs it.
local function is_live(id)
  local value = redis.call('HGET', IDS, id)
  if in_front(id, value) then return true end
  local where = located(id, value)
  if not where then return false end
  local place, entry = where:match('^(.*):(%d+%-%d+)$')
  local stream = stream_of(place)
  local found = redis.pcall('XRANGE', stream, entry, entry)
  if found.err or #found == 0 or decode(found[1][2]) ~= id then return false end
  local pending = redis.pcall('XPENDING', stream, GROUP, entry, entry, 1)
  if pending.err or #pending > 0 then return true end
  for _, group in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
    local named = {}
    for i = 1, #group, 2 do named[group[i]] = group[i + 1] end
    if named.name == GROUP then
      return is_before(named['last-delivered-id'], entry)
    end
  end
  return true
end

local chosen, seen, tokens = {}, {}, 0
for i = FIRST, #ARGV, 3 do
  local id = ARGV[i]
  if not seen[id] and not is_live(id) then
    seen[id] = true
    chosen[#chosen + 1] = i
    tokens = tokens + tonumber(ARGV[i + 2])
  end
end

if ARGV[5] == 'again' then
  local beyond = #chosen + tonumber(redis.call('HGET', META, 'n') or 0) - 2 * tonumber(ARGV[1])
  if #chosen > 0 and beyond > 0 then return { -1, 1, wait_for(0) } end
elseif ARGV[5] == 'new' then
  local entries, wanted = #chosen + tonumber(ARGV[3]), tokens + tonumber(ARGV[4])
  local which, after = excess(entries, wanted, tonumber(ARGV[1]), tonumber(ARGV[2]))
  if which then return { -1, which, after } end
end

local added = {}
for _, i in ipairs(chosen) do
  local id, place, cost = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2])
  redis.call('ZREM', DUE, id)
  local sums = added[place]
  if not sums then
    sums = { 0, 0 }
    added[place] = sums
    open(place)
  end
  if ARGV[5] == 'again' then
    redis.call('HSET', IDS, id, string.format('=%d:%s', cost, place))
    redis.call('ZADD', front_of(place), 0, id)
  else
    append(id, place, cost)
  end
  sums[1], sums[2] = sums[1] + 1, sums[2] + cost
end
for place, sums in pairs(added) do
  count(place, sums[1], sums[2])
  activate(place)
end
if #chosen > 0 then ring(#chosen) end
return { #chosen, 0, 0 }
