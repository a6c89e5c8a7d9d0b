--[[
  Adds entries, all or none. Jobs that wait or are pending stay as they are.

  ARGV[1]   most entries that may wait
  ARGV[2]   most tokens that may wait
  ARGV[3]   entries that later calls add, which must fit as well
  ARGV[4]   tokens of these
  ARGV[5]   mode: `new`; `checked` if the limits were checked before; `requeue` for jobs that go in front, up to twice
            the limit of entries, which bounds Redis's memory
  ARGV[6…]  four for each entry: job, place, cost, deadline in ms; `0` without one, `first` for a job that goes in front

  Returns {number of entries added, 0, 0}, or {-1, exceeded limit, time to retry in ms}
]]
local entries_max, tokens_max = tonumber(ARGV[1]), tonumber(ARGV[2])
local entries_after, tokens_after, mode = tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5]
local FIRST_ENTRY = 6

-- Whether the job is in front, or its entry is fresh or pending where its location says. An entry that another program
-- deleted, or acknowledged without deleting, is not live: adding it again repairs it.
local function is_live(id)
  local location = redis.call('HGET', locations_key, id)
  if is_in_front(id, location) then return true end
  local place_and_entry = entry_of(id, location)
  if not place_and_entry then return false end
  local place, entry = place_and_entry:match('^(.*):(%d+%-%d+)$')
  local stream = stream_key(place)
  local found = redis.pcall('XRANGE', stream, entry, entry)
  if found.err or #found == 0 or decode_entry(found[1][2]) ~= id then return false end
  local pending = redis.pcall('XPENDING', stream, GROUP, entry, entry, 1)
  if pending.err or #pending > 0 then return true end
  local delivered = last_delivered(stream)
  return not delivered or is_before(delivered, entry)
end

-- Positions in ARGV of the entries to add.
local new, seen, tokens = {}, {}, 0
for i = FIRST_ENTRY, #ARGV, 4 do
  local id, cost = ARGV[i], ARGV[i + 2]
  if not seen[id] and not is_live(id) then
    seen[id] = true
    new[#new + 1] = i
    tokens = tokens + tonumber(cost)
  end
end

if mode == 'requeue' then
  local waiting = tonumber(redis.call('HGET', meta_key, 'entries') or 0)
  if #new > 0 and waiting + #new > 2 * entries_max then return { -1, LIMIT_ENTRIES, time_to_drain(0) } end
elseif mode == 'new' then
  local limit, retry_ms =
    exceeded_limit(#new + entries_after, tokens + tokens_after, entries_max, tokens_max)
  if limit then return { -1, limit, retry_ms } end
end

local added = {}
for _, i in ipairs(new) do
  local id, place, cost, expires = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2]), ARGV[i + 3]
  redis.call('ZREM', due_key, id)
  local sums = added[place]
  if not sums then
    sums = { entries = 0, tokens = 0 }
    added[place] = sums
    open_stream(place)
  end
  if mode == 'requeue' or expires == 'first' then
    local score = expires == 'first' and FIRST_SCORE or REQUEUED_SCORE
    redis.call('HSET', locations_key, id, string.format('=%d:%s', cost, place))
    redis.call('ZADD', front_key(place), score, id)
  else
    append_entry(id, place, cost, expires)
  end
  sums.entries, sums.tokens = sums.entries + 1, sums.tokens + cost
end
for place, sums in pairs(added) do
  add_waiting(place, sums.entries, sums.tokens)
  activate(place)
end
if #new > 0 then wake(#new) end
return { #new, 0, 0 }
