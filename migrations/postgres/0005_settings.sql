-- What is set for the whole database, by name. `retention_ms`: how long jobs are kept after they are
-- over; the program's default when it is not there.

CREATE TABLE settings (
    name  text PRIMARY KEY,
    value bigint NOT NULL
);
