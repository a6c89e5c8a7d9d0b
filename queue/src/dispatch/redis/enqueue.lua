-- Adds entries, all or none.
-- ARGV: entries_max tokens_max entries_after tokens_after forced, then per entry: id place cost.
-- entries_after and tokens_after come in later calls and must fit too; forced: already checked.
-- Returns {added, 0, 0}, or {-1, exceeded limit (1 entries, 2 tokens), retry_after in ms}.
local FIRST = 6

-- Whether the job's entry is fresh or pending at its place in IDS. An entry that another program deleted,
-- or acknowledged without deleting, is not live: adding it again repairs it.
local function is_live(id)
  local where = located(id)
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

if ARGV[5] == '0' then
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
  append(id, place, cost)
  sums[1], sums[2] = sums[1] + 1, sums[2] + cost
end
for place, sums in pairs(added) do
  count(place, sums[1], sums[2])
  activate(place)
end
if #chosen > 0 then ring() end
return { #chosen, 0, 0 }
