-- Extends leases. ARGV: now, lease in ms, then each claim (`ID:EPOCH`). Returns the positions (from 0) of
-- the lost claims.
local ends, leases = text(clock() + ARGV[2]), {}
local mine, lost = held(3, 1)
for n, i in ipairs(mine) do
  leases[2 * n - 1], leases[2 * n] = ends, ARGV[i]
end
many('ZADD', LEASES, leases)
return lost
