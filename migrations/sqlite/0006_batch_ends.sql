-- Who asked for a batch twice, and who wants to hear of its end.

ALTER TABLE batches ADD COLUMN idempotency_key TEXT;
ALTER TABLE batches ADD COLUMN webhook_due INTEGER;  -- NULL: nobody is to be told, or all is told
CREATE UNIQUE INDEX batches_by_idempotency_key ON batches (tenant, idempotency_key)
    WHERE idempotency_key IS NOT NULL;
CREATE INDEX batches_webhook_due ON batches (webhook_due) WHERE webhook_due IS NOT NULL;
