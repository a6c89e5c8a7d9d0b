"""The `openai` package: files and batches. See `checks.py` for how to run it."""

import io
import json
import time

import openai

from checks import (
    BASE_URL,
    EMBEDDING_MODEL,
    KEY,
    MODEL,
    NAMED,
    QUESTION,
    STRUCTURED_TOKENS,
    TOOLS,
    Date,
    Weather,
    check,
    equal,
    refused,
    run,
)

client = openai.OpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0, timeout=60)
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ENDED = ("completed", "failed", "expired", "cancelled")
MISSING = "file-00000000000000000000000000000000"


def question(**changes):
    """Returns the body of a line of a chat."""
    messages = [{"role": "user", "content": QUESTION}]
    return {"model": MODEL, "messages": messages, "max_tokens": 4, "seed": 1} | changes


def content(bodies, url=CHAT):
    """Returns the content of an input file."""
    lines = [
        {"custom_id": f"q{number}", "method": "POST", "url": url, "body": body} for number, body in enumerate(bodies)
    ]
    return "\n".join(json.dumps(line) for line in lines).encode()


def upload(data):
    """Uploads an input file."""
    return client.files.create(file=("in.jsonl", io.BytesIO(data)), purpose="batch")


def create(bodies, url=CHAT, **changes):
    """Creates a batch of lines."""
    return client.batches.create(
        input_file_id=upload(content(bodies, url)).id, endpoint=url, completion_window="24h", **changes
    )


def ended(batch):
    """Waits for the end of a batch and returns it."""
    started = time.monotonic()
    while batch.status not in ENDED:
        assert time.monotonic() - started < 60, batch
        time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
    return batch


def answers(batch):
    """Returns the bodies of a completed batch's answers by `custom_id`."""
    lines = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    equal({line["response"]["status_code"] for line in lines}, {200}, "status codes")
    return {line["custom_id"]: line["response"]["body"] for line in lines}


@check
def file_is_stored():
    data = content([question()])
    file = upload(data)
    equal((file.object, file.bytes, file.purpose, file.filename), ("file", len(data), "batch", "in.jsonl"))
    equal(client.files.retrieve(file.id), file, "retrieved file")
    equal(client.files.content(file.id).read(), data, "content")
    equal(client.files.wait_for_processing(file.id).status, "processed", "status")
    deletion = client.files.delete(file.id)
    equal((deletion.id, deletion.deleted), (file.id, True))
    refused(openai.NotFoundError, lambda: client.files.retrieve(file.id))
    refused(openai.NotFoundError, lambda: client.files.content(file.id))


@check
def file_list_has_pages():
    ids = [upload(content([question(seed=seed)])).id for seed in range(3)]
    page = client.files.list(limit=2)
    equal([len(page.data), page.has_next_page()], [2, True], "page")
    listed = [file.id for file in client.files.list(limit=2, purpose="batch")]
    assert set(ids) <= set(listed) and len(set(listed)) == len(listed), listed
    for file in ids:
        client.files.delete(file)


@check
def file_that_expires():
    expiry = {"anchor": "created_at", "seconds": 3600}
    data = io.BytesIO(content([question()]))
    file = client.files.create(file=("in.jsonl", data), purpose="batch", expires_after=expiry)
    equal(file.expires_at - file.created_at, 3600, "seconds")


@check
def file_errors():
    refused(openai.NotFoundError, lambda: client.files.retrieve(MISSING))
    call = lambda: client.files.create(file=("in.jsonl", io.BytesIO(b"{}")), purpose="vision")
    refused(openai.BadRequestError, call, "purpose")


@check
def batch_of_chats():
    batch = create([question(seed=seed) for seed in range(5)], metadata={"month": "march"})
    equal((batch.object, batch.endpoint, batch.metadata), ("batch", CHAT, {"month": "march"}))
    batch = ended(batch)
    equal((batch.status, batch.error_file_id, batch.errors), ("completed", None, None))
    counts = batch.request_counts
    equal((counts.total, counts.completed, counts.failed), (5, 5, 0), "request_counts")
    assert batch.created_at <= batch.in_progress_at <= batch.completed_at <= batch.expires_at, batch
    bodies = answers(batch)
    equal(sorted(bodies), [f"q{number}" for number in range(5)], "custom_ids")
    alone = client.chat.completions.create(**question(seed=3)).choices[0].message.content
    equal(bodies["q3"]["choices"][0]["message"]["content"], alone, "text of a line and alone")
    spent = sum(body["usage"]["total_tokens"] for body in bodies.values())
    equal((batch.usage.total_tokens, batch.usage.output_tokens), (spent, 20), "usage")


@check
def batch_of_several_endpoints():
    message = question() | {"messages": question()["messages"]}
    bodies = [(CHAT, question()), (TEXT, {"model": MODEL, "prompt": "Paid", "max_tokens": 4}), ("/v1/messages", message)]
    response = {"model": MODEL, "input": "Paid on March 3, 2024", "max_output_tokens": 4, "temperature": 0.5}
    bodies += [("/v1/responses", response | {"seed": 3})]
    bodies += [("/v1/embeddings", {"model": EMBEDDING_MODEL, "input": "Paid"}), (CHAT, question(model="other"))]
    lines = [{"custom_id": f"q{n}", "method": "POST", "url": url, "body": body} for n, (url, body) in enumerate(bodies)]
    file = upload("\n".join(json.dumps(line) for line in lines).encode())
    refused_one = ended(client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h"))
    equal((refused_one.status, refused_one.errors.data[0].code), ("failed", "invalid_url"))
    batch = ended(client.batches.create(input_file_id=file.id, endpoint="mixed", completion_window="24h"))
    equal((batch.status, batch.endpoint, batch.request_counts.completed, batch.request_counts.failed), ("completed", "mixed", 5, 1))
    kinds = {name: body.get("object") or body["type"] for name, body in answers(batch).items()}
    equal(kinds, {"q0": "chat.completion", "q1": "text_completion", "q2": "message", "q3": "response", "q4": "list"}, "kinds of answers")
    answer = openai.types.responses.Response.model_validate(answers(batch)["q3"])
    equal((answer.model, answer.temperature, answer.usage.output_tokens), (MODEL, 0.5, 4), "a response")
    alone = client.responses.create(**response, extra_body={"seed": 3})
    equal((answer.output_text, answer.status), (alone.output_text, alone.status), "text of a line and alone")
    error = json.loads(client.files.content(batch.error_file_id).text)["response"]
    equal((error["status_code"], error["body"]["error"]["code"]), (404, "model_not_found"))
    results = client.get(f"/batches/{batch.id}/results", cast_to=str).splitlines()
    shown = {line["custom_id"]: line["response"]["body"] for line in map(json.loads, results)}
    assert all(shown[name] == body for name, body in answers(batch).items()), "results are those of the file"


@check
def batch_that_is_open():
    line = lambda name, **changes: {"custom_id": name, "method": "POST", "url": CHAT, "body": question(**changes)}
    body = {"endpoint": CHAT, "completion_window": "24h", "open": True}
    batch = client.post("/batches", body=body, cast_to=openai.types.Batch)
    path = f"/batches/{batch.id}"

    def add(*lines):
        text = "\n".join(json.dumps(one) for one in lines)
        headers = {"Content-Type": "application/x-ndjson"}
        found = client.post(f"{path}/lines", content=text.encode(), options={"headers": headers}, cast_to=str)
        return tuple(json.loads(found)[name] for name in ("added", "known", "total"))

    # Until its file is checked.
    started = time.monotonic()
    while client.batches.retrieve(batch.id).status == "validating":
        assert time.monotonic() - started < 60, batch
        time.sleep(0.05)
    equal(add(line("a"), line("b")), (2, 0, 2))
    equal(add(line("b"), line("c")), (1, 1, 3), "a line that comes again")
    refused(openai.ConflictError, lambda: add(line("d"), line("a", seed=9)), "custom_id", "custom_id_taken")
    error = refused(openai.BadRequestError, lambda: add(line("d"), line("e", temperature=9)), "body.temperature")
    assert "line 2" in error.message, error
    while client.batches.retrieve(batch.id).request_counts.completed < 3:
        assert time.monotonic() - started < 60, "lines run as they come"
        time.sleep(0.05)
    equal(client.batches.retrieve(batch.id).status, "in_progress")
    for _ in range(2):
        client.post(f"{path}/seal", cast_to=openai.types.Batch)
    batch = ended(client.batches.retrieve(batch.id))
    equal((batch.status, batch.request_counts.total, sorted(answers(batch))), ("completed", 3, ["a", "b", "c"]))
    refused(openai.ConflictError, lambda: add(line("d")), code="batch_closed")


@check
def batch_of_texts():
    batch = ended(create([{"model": MODEL, "prompt": ["Paid", "Due"], "max_tokens": 4}], TEXT))
    equal(len(answers(batch)["q0"]["choices"]), 2, "number of choices")


@check
def batch_of_structured_output():
    schema = {"type": "json_schema", "json_schema": {"name": "date", "schema": Date.model_json_schema()}}
    batch = ended(create([question(max_tokens=STRUCTURED_TOKENS, response_format=schema)]))
    Date.model_validate_json(answers(batch)["q0"]["choices"][0]["message"]["content"])


@check
def batch_of_calls_of_tools():
    batch = ended(create([question(max_tokens=STRUCTURED_TOKENS, tools=TOOLS, tool_choice=NAMED)]))
    message = answers(batch)["q0"]["choices"][0]["message"]
    Weather.model_validate_json(message["tool_calls"][0]["function"]["arguments"])


@check
def batch_with_lines_that_fail():
    batch = ended(create([question(), question(temperature=9), question(color=1)]))
    counts = batch.request_counts
    equal((batch.status, counts.completed, counts.failed), ("completed", 1, 2))
    equal(list(answers(batch)), ["q0"], "answers")
    lines = [json.loads(line) for line in client.files.content(batch.error_file_id).text.splitlines()]
    told = {line["custom_id"]: line["response"]["body"]["error"]["param"] for line in lines}
    equal(told, {"q1": "temperature", "q2": "color"}, "errors")


@check
def batch_of_a_file_that_is_no_input():
    file = upload(b"this is not JSON\n")
    batch = ended(client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h"))
    if batch.status == "failed":
        assert batch.errors.data[0].message and batch.errors.data[0].line == 1, batch.errors
    else:
        equal((batch.status, batch.request_counts.failed), ("completed", 1))


@check
def batch_that_is_cancelled():
    batch = create([question(seed=seed, max_tokens=2000, ignore_eos=True) for seed in range(50)])
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    equal(ended(batch).status, "cancelled", "status")
    done = ended(create([question()]))
    refused(openai.BadRequestError, lambda: client.batches.cancel(done.id))


@check
def batch_list_has_pages():
    ids = [create([question(seed=seed)]).id for seed in range(3)]
    equal([batch.id for batch in client.batches.list(limit=2)][:3], ids[::-1], "newest batches")
    for batch in ids:
        ended(client.batches.retrieve(batch))


@check
def batch_idempotency_key():
    same = {
        "input_file_id": upload(content([question()])).id,
        "endpoint": CHAT,
        "completion_window": "24h",
        "extra_headers": {"Idempotency-Key": f"batch-{time.time_ns()}"},
    }
    first = client.batches.create(**same)
    equal(client.batches.create(**same).id, first.id, "id")
    refused(openai.ConflictError, lambda: client.batches.create(**same, metadata={"a": "b"}))


@check
def batch_errors():
    file = upload(content([question()])).id
    asked = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
    call = lambda **changes: client.batches.create(**asked | changes)
    refused(openai.BadRequestError, lambda: call(endpoint="/v1/moderations"), "endpoint")
    refused(openai.BadRequestError, lambda: call(completion_window="soon"), "completion_window")
    error = refused((openai.NotFoundError, openai.BadRequestError), lambda: call(input_file_id=MISSING))
    equal(error.param, "input_file_id", "param")
    refused(openai.NotFoundError, lambda: client.batches.retrieve("batch_0"))


if __name__ == "__main__":
    run()
