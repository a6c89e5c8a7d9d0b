-- Records how attempts ended. ARGV: now, retention in ms, then the wait before a second attempt, the
-- longest wait and the doublings that count, then of each attempt: id, epoch, verdict (a state's
-- letter), outcome, error or nothing, jitter, prompt tokens, generated tokens. A verdict of retrying
-- becomes failed when no attempt is left. Returns a letter for each: its state now, or `-`.
local FIRST, STEP = 6, 8
local now, retention = clock(), ARGV[2]
local base, longest, doublings = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local ids, done, letters, settled, retrying = {}, {}, {}, {}, {}
local counts = { prompt_tokens = 0, completion_tokens = 0 }
for n = 1, (#ARGV - FIRST + 1) / STEP do letters[n] = '-' end
local mine = held(FIRST, STEP)
for n, i in ipairs(mine) do ids[n] = ARGV[i] end
for n, value in ipairs(values(ids)) do
  local i, id, head = mine[n], ids[n], parse(value)
  if head and not done[id] then
    done[id] = true
    settled[#settled + 1] = claim_of(id, ARGV[i + 1])
    local state, attempts = ARGV[i + 2], head.attempts
    if state == 't' and attempts + 1 >= head.attempts_max then state = 'f' end
    if ARGV[i + 4] ~= '' then note(id, head, ARGV[i + 4]) end
    if state == 't' then
      head.state = 't'
      if has(head, HAS_SAVED) then
        redis.call('DEL', SAVED .. id)
        head.flags = head.flags - HAS_SAVED
      end
      write(id, head)
      local wait = math.min(base * 2 ^ math.min(attempts, doublings), longest)
      retrying[#retrying + 1] = now + math.floor(wait * tonumber(ARGV[i + 5]))
      retrying[#retrying + 1] = id
      if head.expires_at > 0 then redis.call('ZADD', DEADLINES, head.expires_at, id) end
    else
      over(id, head, value, state, ARGV[i + 3], now, retention)
      counts[NAMES[state]] = (counts[NAMES[state]] or 0) + 1
      counts.prompt_tokens = counts.prompt_tokens + ARGV[i + 6]
      counts.completion_tokens = counts.completion_tokens + ARGV[i + 7]
    end
    letters[(i - FIRST) / STEP + 1] = state
  end
end
many('ZREM', LEASES, settled)
many('ZADD', RETRYING, retrying)
total(counts)
return table.concat(letters)
