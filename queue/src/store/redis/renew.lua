-- Extends leases, and takes back jobs that lost theirs and were not claimed since. ARGV: now, lease in
-- ms, then each claim (`ID:EPOCH`). Returns the positions (from 0) of the lost claims.
local now, leases = clock(), {}
local ends = text(now + ARGV[2])
local mine, lost = held_or_lapsed(3, 1, now)
for n, i in ipairs(mine) do
  leases[2 * n - 1], leases[2 * n] = ends, ARGV[i]
end
many('ZADD', LEASES, leases)
return lost
