-- The longest predicted wait of a new job of a queue: as in the servers' schema.

ALTER TABLE queues ADD COLUMN max_wait_ms INTEGER;
