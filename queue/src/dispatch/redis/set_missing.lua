-- ARGV: what the queue lacks: entries, tokens, whether a refill is under way.
redis.call('HSET', META, 'missing', ARGV[1], 'missing_t', ARGV[2], 'refilling', ARGV[3], 'run', run_id())
return 1
