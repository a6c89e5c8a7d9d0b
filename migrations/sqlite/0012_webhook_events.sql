-- The events that a tenant's webhook is told of, as a JSON list; NULL: all.
ALTER TABLE tenant_webhooks ADD COLUMN events TEXT;
