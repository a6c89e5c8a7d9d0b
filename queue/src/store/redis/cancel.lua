-- Withdraws jobs that are not over. ARGV: now, retention in ms, then ids. Returns the positions (from
-- 0) of those it withdrew.
local now, retention, ids, withdrawn = clock(), tonumber(ARGV[2]), {}, {}
for i = 3, #ARGV do ids[#ids + 1] = ARGV[i] end
for n, id in ipairs(ids) do
  -- One by one: an id may be here twice.
  local value = redis.call('GET', JOB .. id)
  local head = parse(value)
  local set = head and SETS[head.state]
  if set then
    redis.call('ZREM', set, id)
    if head.expires_at > 0 then redis.call('ZREM', DEADLINES, id) end
    head.epoch = head.epoch + 1
    over(id, head, value, 'x', '', now, retention)
    withdrawn[#withdrawn + 1] = n - 1
  end
end
total({ cancelled = #withdrawn })
return withdrawn
