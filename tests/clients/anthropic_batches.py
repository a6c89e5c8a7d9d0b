"""The `anthropic` package: Message Batches. See `checks.py` for how to run it."""

import time

import anthropic

from checks import BASE_URL, KEY, MODEL, QUESTION, check, equal, refused, run

client = anthropic.Anthropic(base_url=BASE_URL.removesuffix("/v1"), api_key=KEY, max_retries=0, timeout=60)
batches = client.messages.batches
PARAMS = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 4, "temperature": 0}


def request(name, **changes):
    return {"custom_id": name, "params": PARAMS | changes}


def ended(batch):
    """Waits for the end of a batch."""
    started = time.monotonic()
    while batch.processing_status != "ended":
        assert time.monotonic() - started < 60, batch
        time.sleep(0.1)
        batch = batches.retrieve(batch.id)
    return batch


@check
def batch_of_messages():
    created = batches.create(requests=[request(f"q{number}", seed=number) for number in range(3)])
    equal((created.type, created.request_counts.processing), ("message_batch", 3))
    batch = ended(created)
    counts = batch.request_counts
    equal((counts.succeeded, counts.errored, counts.processing), (3, 0, 0), "request_counts")
    assert batch.created_at <= batch.ended_at <= batch.expires_at, batch
    results = {line.custom_id: line.result for line in batches.results(batch.id)}
    equal(sorted(results), ["q0", "q1", "q2"], "custom_ids")
    alone = client.messages.create(**{k: v for k, v in PARAMS.items() if k != "temperature"}, extra_body={"temperature": 0})
    equal(results["q0"].message.content[0].text, alone.content[0].text, "text of a line and alone")
    equal(results["q0"].message.usage.output_tokens, alone.usage.output_tokens, "output_tokens")


@check
def batch_with_requests_that_fail():
    image = [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "https://i.example"}}]}]
    requests = [request("fine"), request("image", messages=image), request("other", model="other")]
    batch = ended(batches.create(requests=requests))
    equal((batch.request_counts.succeeded, batch.request_counts.errored), (1, 2), "request_counts")
    results = {line.custom_id: line.result for line in batches.results(batch.id)}
    equal({name: result.type for name, result in results.items()}, {"fine": "succeeded", "image": "errored", "other": "errored"})
    equal(results["image"].error.error.type, "invalid_request_error", "type")
    equal(results["other"].error.error.type, "not_found_error", "type")
    assert "messages[0].content[0].type" in results["image"].error.error.message, results["image"]


@check
def batch_that_is_cancelled():
    # So many that they do not end before. It may be cancelled before its requests are checked, or while they run.
    batch = batches.create(requests=[request(f"q{n}", seed=n, max_tokens=32, ignore_eos=True) for n in range(500)])
    refused(anthropic.AnthropicError, lambda: list(batches.results(batch.id)))
    cancelled = batches.cancel(batch.id)
    assert cancelled.cancel_initiated_at, cancelled
    batch = ended(cancelled)
    counts = batch.request_counts
    equal((counts.canceled + counts.succeeded, counts.processing), (500, 0), "request_counts")
    kinds = [line.result.type for line in batches.results(batch.id)]
    assert counts.canceled > 0 and kinds.count("canceled") == counts.canceled, (counts, len(kinds))


@check
def batches_are_listed_and_deleted():
    ids = [ended(batches.create(requests=[request("a")])).id for _ in range(3)]
    listed = [batch.id for batch in batches.list(limit=2)]
    equal(listed[:3], ids[::-1], "the latest first, over pages")
    page = batches.list(limit=1, before_id=ids[0])
    equal([batch.id for batch in page.data], [ids[1]], "page before")
    deleted = batches.delete(ids[0])
    equal((deleted.id, deleted.type), (ids[0], "message_batch_deleted"))
    refused(anthropic.NotFoundError, lambda: batches.retrieve(ids[0]))


@check
def batch_errors():
    bad = anthropic.BadRequestError
    refused(bad, lambda: batches.create(requests=[]))
    refused(bad, lambda: batches.create(requests=[request("a"), request("a")]))
    error = refused(bad, lambda: batches.create(requests=[request("a b")]))
    assert "requests[0].custom_id" in error.body["error"]["message"], error.body
    equal(error.body["type"], "error")
    refused(bad, lambda: batches.list(limit=0))


run()
