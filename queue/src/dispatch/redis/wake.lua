--[[
  Wakes waiting consumers of a queue for entries of another shard.

  ARGV[1]  number of entries

  Returns 1
]]
local entries = tonumber(ARGV[1])

wake(entries)
return 1
