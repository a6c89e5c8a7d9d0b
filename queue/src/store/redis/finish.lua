-- Records the ends of attempts. ARGV: now, retention in ms, then the wait before a second attempt, the
-- longest wait and the most doublings, then for each attempt: claim (`ID:EPOCH`), verdict (a state's
-- letter), outcome; then, if completed, prompt and generated tokens, otherwise the error or nothing and
-- the jitter. A verdict of retrying becomes failed when no attempt is left. Returns a letter for each:
-- its new state, or `-` if the claim is lost.
local FIRST, STEP = 6, 5
local now, retention = clock(), ARGV[2]
local base, longest, doublings = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local ids, done, letters, settled, retrying = {}, {}, {}, {}, {}
local counts = { prompt_tokens = 0, completion_tokens = 0 }
for n = 1, (#ARGV - FIRST + 1) / STEP do letters[n] = '-' end
local mine = held_or_lapsed(FIRST, STEP, now)
for n, i in ipairs(mine) do ids[n] = id_of(ARGV[i]) end
for n, value in ipairs(values(ids)) do
  local i, id, head = mine[n], ids[n], parse(value)
  if head and not done[id] then
    done[id] = true
    settled[#settled + 1] = ARGV[i]
    local state, attempts = ARGV[i + 1], head.attempts
    if state == 't' and attempts + 1 >= head.attempts_max then state = 'f' end
    if state ~= 'c' and ARGV[i + 3] ~= '' then note(id, head, ARGV[i + 3]) end
    if state == 't' then
      head.state = 't'
      if has(head, HAS_SAVED) then
        redis.call('DEL', SAVED .. id)
        head.flags = head.flags - HAS_SAVED
      end
      write(id, head)
      local wait = math.min(base * 2 ^ math.min(attempts, doublings), longest)
      retrying[#retrying + 1] = now + math.floor(wait * tonumber(ARGV[i + 4]))
      retrying[#retrying + 1] = id
      if head.expires_at > 0 then redis.call('ZADD', DEADLINES, head.expires_at, id) end
    else
      over(id, head, value, state, ARGV[i + 2], now, retention)
      counts[NAMES[state]] = (counts[NAMES[state]] or 0) + 1
      if state == 'c' then
        counts.prompt_tokens = counts.prompt_tokens + ARGV[i + 3]
        counts.completion_tokens = counts.completion_tokens + ARGV[i + 4]
      end
    end
    letters[(i - FIRST) / STEP + 1] = state
  end
end
many('ZREM', LEASES, settled)
many('ZADD', RETRYING, retrying)
total(counts)
return table.concat(letters)
