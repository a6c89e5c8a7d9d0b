"""Uses every supported call of the openai package; fails at the first unexpected answer."""

import asyncio
import io
import json
import os
import time

import openai

client = openai.OpenAI(max_retries=0)
QUESTION = [{"role": "user", "content": "Paid on the 3rd of March, 2024"}]


def refused(kind, call):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


assert [model.id for model in client.models.list()] == ["demo", "demo@i2_s"]
assert client.models.retrieve("demo").owned_by == "tritmill"
assert abs(client.models.retrieve("demo@i2_s").created - time.time()) < 3600

whole = client.chat.completions.create(model="demo", messages=QUESTION, temperature=0, max_tokens=16)
assert whole.choices[0].message.content == "2024-03-03", whole
assert whole.usage.total_tokens > 0
assert whole._request_id.startswith("req_"), whole._request_id

pieces = list(
    client.chat.completions.create(
        model="demo", messages=QUESTION, temperature=0, max_tokens=16,
        stream=True, stream_options={"include_usage": True},
    )
)
text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
assert text == "2024-03-03", pieces
streamed = pieces[-1].usage
assert streamed.total_tokens == whole.usage.total_tokens, streamed
# The first call left the keys and values of the prompt.
assert whole.usage.prompt_tokens_details.cached_tokens == 0, whole.usage
assert streamed.prompt_tokens_details.cached_tokens > 0, streamed

plain = client.completions.create(model="demo", prompt="Paid", max_tokens=4, seed=1)
pieces = client.completions.create(model="demo", prompt="Paid", max_tokens=4, seed=1, stream=True)
assert "".join(piece.choices[0].text for piece in pieces) == plain.choices[0].text

pieces = list(
    client.chat.completions.create(
        model="demo", messages=QUESTION, temperature=0, max_tokens=16, logprobs=True, top_logprobs=2,
        stream=True,
    )
)
whole = client.chat.completions.create(
    model="demo", messages=QUESTION, temperature=0, max_tokens=16, logprobs=True, top_logprobs=2
)
told = [t for p in pieces if p.choices[0].logprobs for t in p.choices[0].logprobs.content]
assert told == whole.choices[0].logprobs.content and len(told[0].top_logprobs) == 2, told
assert pieces[-1].choices[0].finish_reason == "stop", pieces[-1]
plain = client.completions.create(model="demo", prompt="Paid", max_tokens=4, seed=1, logprobs=1)
pieces = list(
    client.completions.create(
        model="demo", prompt="Paid", max_tokens=4, seed=1, logprobs=1, stream=True
    )
)
# A chunk may hold one token or several.
told = [p.choices[0].logprobs for p in pieces if p.choices[0].logprobs]
for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
    values = [value for piece in told for value in getattr(piece, field)]
    assert values == getattr(plain.choices[0].logprobs, field), (field, told)


async def together():
    many = openai.AsyncOpenAI(max_retries=0)
    asked = [
        many.chat.completions.create(model="demo", messages=QUESTION, temperature=0, max_tokens=16)
        for _ in range(20)
    ]
    texts = [answer.choices[0].message.content for answer in await asyncio.gather(*asked)]
    assert texts == ["2024-03-03"] * 20, texts


asyncio.run(together())

# Streams closed early: the test checks their jobs. Several, because a fast machine may finish one first.
endless = [
    client.chat.completions.create(
        model="demo", messages=QUESTION, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    for _ in range(16)
]
for stream in endless:
    next(iter(stream))
    stream.close()

ask = client.chat.completions.create
error = refused(
    openai.BadRequestError, lambda: ask(model="demo", messages=QUESTION, extra_body={"color": 1})
)
assert error.code == "unknown_parameter" and error.param == "color", error
error = refused(
    openai.BadRequestError, lambda: ask(model="demo", messages=QUESTION, response_format={"type": "xml"})
)
assert error.code == "unsupported_value" and error.param == "response_format.type", error
SCHEMA = {
    "type": "object",
    "properties": {"day": {"type": "integer", "minimum": 1, "maximum": 31}, "month": {"enum": ["March", "May"]}},
    "required": ["day", "month"],
    "additionalProperties": False,
}
structured = {"type": "json_schema", "json_schema": {"name": "date", "strict": True, "schema": SCHEMA}}
answer = ask(model="demo", messages=QUESTION, response_format=structured, max_tokens=300, n=2)
for choice in answer.choices:
    assert choice.finish_reason == "stop", choice
    date = json.loads(choice.message.content)
    assert list(date) == ["day", "month"] and 1 <= date["day"] <= 31, date
answer = ask(model="demo", messages=QUESTION, extra_body={"guided_choice": ["left", "right"]}, stream=True)
assert "".join(chunk.choices[0].delta.content or "" for chunk in answer if chunk.choices) in ("left", "right")
reader = client.with_options(api_key=os.environ["READ_KEY"])
assert len(list(reader.models.list())) == 2
refused(
    openai.PermissionDeniedError,
    lambda: reader.chat.completions.create(model="demo", messages=QUESTION),
)
error = refused(openai.NotFoundError, lambda: ask(model="none", messages=QUESTION))
assert error.code == "model_not_found" and error.param == "model", error
error = refused(openai.BadRequestError, lambda: ask(model="demo", messages=QUESTION, temperature=9))
assert error.param == "temperature", error
long = [{"role": "user", "content": "x " * 20000}]
refused(openai.BadRequestError, lambda: ask(model="demo", messages=long))
refused(openai.BadRequestError, lambda: ask(model="demo", messages=long, stream=True))
stranger = openai.OpenAI(api_key="tm-0", max_retries=0)
error = refused(openai.AuthenticationError, lambda: stranger.models.list())
assert error.code == "invalid_api_key" and error.type == "authentication_error", error

lines = [
    {
        "custom_id": f"q{day}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {
            "model": "demo",
            "messages": [{"role": "user", "content": f"Paid on March {day}, 2024"}],
            "temperature": 0,
            "max_tokens": 16,
        },
    }
    for day in range(1, 21)
]
content = "\n".join(json.dumps(line) for line in lines).encode()
uploaded = client.files.create(file=("in.jsonl", io.BytesIO(content)), purpose="batch")
assert uploaded.bytes == len(content) and uploaded.purpose == "batch", uploaded
assert client.files.retrieve(uploaded.id) == uploaded
assert client.files.content(uploaded.id).read() == content
once = dict(file=("in.jsonl", content), purpose="batch", extra_headers={"Idempotency-Key": "input"})
lasting = client.files.create(**once)
assert client.files.create(**once).id == lasting.id
assert client.files.delete(lasting.id).deleted
batch = client.batches.create(
    input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h",
    metadata={"month": "march"},
)
started = time.monotonic()
while batch.status not in ("completed", "failed", "expired", "cancelled"):
    assert time.monotonic() - started < 120, batch
    time.sleep(0.1)
    batch = client.batches.retrieve(batch.id)
assert batch.status == "completed" and batch.error_file_id is None, batch
assert (batch.request_counts.completed, batch.request_counts.total) == (20, 20), batch
assert batch.metadata == {"month": "march"}
answers = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
dates = {a["custom_id"]: a["response"]["body"]["choices"][0]["message"]["content"] for a in answers}
assert dates == {f"q{day}": f"2024-03-{day:02}" for day in range(1, 21)}, dates
key = {"Idempotency-Key": "march"}
again = dict(
    input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h",
    metadata={"month": "april"}, extra_headers=key,
)
low = client.batches.create(**again, extra_body={"priority": "low"})
assert client.batches.create(**again, extra_body={"priority": "low"}).id == low.id
error = refused(openai.ConflictError, lambda: client.batches.create(**again))
assert error.code == "idempotency_conflict", error
while client.batches.retrieve(low.id).status != "completed":
    assert time.monotonic() - started < 120
    time.sleep(0.1)
assert [listed.id for listed in client.batches.list(limit=1)] == [low.id, batch.id]
low = client.batches.retrieve(low.id)
names = [listed.id for listed in client.files.list(limit=1)]
assert sorted(names) == sorted([uploaded.id, batch.output_file_id, low.output_file_id]), names
error = refused(openai.BadRequestError, lambda: client.batches.cancel(batch.id))
assert error.code == "invalid_state", error
assert client.files.delete(uploaded.id).deleted
refused(openai.NotFoundError, lambda: client.files.retrieve(uploaded.id))
refused(openai.NotFoundError, lambda: client.batches.retrieve("batch_0"))
print("served")
