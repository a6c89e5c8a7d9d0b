"""Celery: groups of a thousand; results in database 1. Arguments: URL JOBS (to submit)."""

import json
import os
import sys
import time

from celery import Celery, group

BULK = 1000
URL = os.environ.get("PEER_REDIS") or (sys.argv[1] if len(sys.argv) == 3 else "redis://localhost")
app = Celery("celery_peer", broker=f"{URL}/0", backend=f"{URL}/1")


@app.task(name="answer")
def answer(prompt, max_tokens):
    return "an answer of a few words"


def main():
    app.connection_for_write().ensure_connection(max_retries=3)
    jobs = int(sys.argv[2])
    texts = [f"Invoice {i} was paid on the {1 + i % 28} of March" for i in range(jobs)]
    started = time.perf_counter()
    with app.producer_pool.acquire(block=True) as producer:
        for at in range(0, jobs, BULK):
            group(answer.s(text, 16) for text in texts[at:at + BULK]).apply_async(producer=producer)
    print(json.dumps({"seconds": time.perf_counter() - started}))


if __name__ == "__main__":
    main()
