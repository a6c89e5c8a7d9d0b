-- Numerics classes beside the first worker's that operators let a queue have: a JSON array.

ALTER TABLE queues ADD COLUMN allowed_classes TEXT NOT NULL DEFAULT '[]';
