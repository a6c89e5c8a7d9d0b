-- Shards of queues: a hash of the begin of each job's prompt decides which shard has it. Jobs of the release
-- before, which has no shards, are in shard 0.

ALTER TABLE open_jobs ADD COLUMN shard_key integer NOT NULL DEFAULT 0;
ALTER TABLE jobs ADD COLUMN shard_key integer NOT NULL DEFAULT 0;
