-- Numerics classes beside the first worker's that operators let a queue have.

ALTER TABLE queues ADD COLUMN allowed_classes text[] NOT NULL DEFAULT '{}';
