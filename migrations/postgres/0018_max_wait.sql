-- The longest predicted wait of a new job of a queue, by an operator.

ALTER TABLE queues ADD COLUMN max_wait_ms bigint;
