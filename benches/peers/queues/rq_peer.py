"""RQ: `enqueue_many` of five hundred. Arguments: URL JOBS (to submit)."""

import json
import sys
import time

BULK = 500


def answer(prompt, max_tokens):
    return "an answer of a few words"


def main():
    from redis import Redis
    from rq import Queue

    queue = Queue("peer", connection=Redis.from_url(sys.argv[1]))
    jobs = int(sys.argv[2])
    queue.connection.ping()
    texts = [f"Invoice {i} was paid on the {1 + i % 28} of March" for i in range(jobs)]
    started = time.perf_counter()
    for at in range(0, jobs, BULK):
        queue.enqueue_many([Queue.prepare_data("rq_peer.answer", (text, 16)) for text in texts[at:at + BULK]])
    print(json.dumps({"seconds": time.perf_counter() - started}))


if __name__ == "__main__":
    main()
