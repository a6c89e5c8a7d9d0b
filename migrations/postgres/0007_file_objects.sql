-- The content of a chunk may lie in an object store; the row then has the name of its object and no bytes.
ALTER TABLE file_chunks ADD COLUMN object text;
