-- wanted_workers as before, but for workers with this model not loaded, which report no slots.

CREATE OR REPLACE FUNCTION wanted_workers(of_model text, of_format text, target_s double precision DEFAULT 600,
                               rate_default double precision DEFAULT 100)
RETURNS bigint LANGUAGE sql STABLE
BEGIN ATOMIC
    WITH clock AS (SELECT store_now_ms(NULL) AS now), queue AS (
        SELECT coalesce(bool_or(paused), false) AS paused,
               greatest(coalesce(max(worker_tokens_per_s), rate_default), 0.001) AS rate
        FROM queues WHERE model = of_model AND format = of_format
    ), queued AS (
        SELECT cost, expires_at FROM open_jobs
        WHERE state = 'queued' AND model = of_model AND format = of_format ORDER BY id LIMIT 100000
    ), due AS (
        SELECT cost, expires_at FROM open_jobs, clock
        WHERE state IN ('scheduled', 'retrying') AND run_at <= now + 60000
          AND model = of_model AND format = of_format LIMIT 100000
    ), waiting AS (
        SELECT count(*) AS jobs, coalesce(sum(cost), 0) AS tokens, min(expires_at) AS deadline
        FROM (SELECT cost, expires_at FROM queued UNION ALL SELECT cost, expires_at FROM due) AS both_kinds
    ), running AS (
        SELECT count(*) AS jobs FROM open_jobs
        WHERE state = 'running' AND model = of_model AND format = of_format
    ), serving AS (
        SELECT greatest(coalesce(avg(slots), 64), 1) AS slots FROM workers, clock
        WHERE model = of_model AND format = of_format AND seen_at >= now - 15000 AND slots > 0
    )
    SELECT greatest(
        ceil(running.jobs / slots)::bigint,
        CASE WHEN paused OR waiting.jobs = 0 THEN 0
             ELSE greatest(1, ceil(tokens / (rate * greatest(
                      30, least(target_s, coalesce((deadline - now) / 1000.0, target_s)))))::bigint)
        END
    )
    FROM clock, queue, waiting, running, serving;
END;
