"""The `openai` package: chat completions, completions, models, headers and errors.

See `checks.py` for how to run it. `openai_tools.py`, `openai_responses.py` and `openai_batches.py` use the rest of the
package.
"""

import asyncio
import re
import time
import uuid

import openai

from chats import SHORT, ask, client, joined, text
from checks import (
    BASE_URL,
    EMBEDDING_MODEL,
    KEY,
    MESSAGES,
    MODEL,
    QUESTION,
    check,
    equal,
    one_of,
    refused,
    run,
    unit,
)

# Plain answers


@check
def chat_plain():
    answer = ask()
    assert answer.id.startswith("chatcmpl-"), answer.id
    equal((answer.object, answer.model), ("chat.completion", MODEL))
    assert abs(answer.created - time.time()) < 3600, answer.created
    choice = answer.choices[0]
    equal((len(answer.choices), choice.index, choice.message.role), (1, 0, "assistant"))
    equal((choice.message.refusal, choice.message.tool_calls, choice.logprobs), (None, None, None))
    one_of(choice.finish_reason, ["stop", "length"])
    usage = answer.usage
    assert 0 < usage.completion_tokens <= 16 and usage.prompt_tokens > 0, usage
    equal(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens, "total_tokens")


@check
def chat_stream():
    chunks = list(ask(stream=True))
    equal(joined(chunks), text(ask()), "text")
    equal({chunk.object for chunk in chunks}, {"chat.completion.chunk"})
    equal(len({(chunk.id, chunk.model, chunk.created) for chunk in chunks}), 1, "number of heads")
    equal(chunks[0].choices[0].delta.role, "assistant", "role")
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    one_of(reasons[-1], ["stop", "length"], "last finish_reason")
    equal(set(reasons[:-1]), {None}, "earlier finish_reasons")
    equal({chunk.usage for chunk in chunks}, {None}, "usage")


@check
def chat_stream_with_usage():
    *chunks, last = ask(stream=True, stream_options={"include_usage": True})
    equal({chunk.usage for chunk in chunks}, {None}, "usage before the last chunk")
    equal(last.choices, [], "choices of the last chunk")
    equal(last.usage.total_tokens, ask().usage.total_tokens, "total_tokens")


@check
def chat_stream_options_need_stream():
    refused(openai.BadRequestError, lambda: ask(stream_options={"include_usage": True}), "stream_options")


@check
def chat_several_choices():
    answer = ask(n=3)
    equal([choice.index for choice in answer.choices], [0, 1, 2], "indexes")
    assert answer.usage.completion_tokens > 16, answer.usage
    chunks = list(ask(n=3, stream=True))
    for choice in answer.choices:
        equal(joined(chunks, choice.index), choice.message.content, "text of the stream")


@check
def chat_logprobs():
    answer = ask(logprobs=True, top_logprobs=3)
    tokens = answer.choices[0].logprobs.content
    equal(len(tokens), answer.usage.completion_tokens, "number of tokens")
    written = b"".join(bytes(token.bytes) for token in tokens).decode(errors="replace")
    equal(written, text(answer), "text of the tokens")
    for token in tokens:
        tops = [top.logprob for top in token.top_logprobs]
        assert len(tops) == 3 and tops == sorted(tops, reverse=True) and token.logprob <= 0, token
    equal(ask(logprobs=True).choices[0].logprobs.content[0].top_logprobs, [], "top_logprobs")


@check
def chat_logprobs_in_stream():
    whole = ask(logprobs=True, top_logprobs=2)
    chunks = [chunk.choices[0].logprobs for chunk in ask(logprobs=True, top_logprobs=2, stream=True)]
    told = [token for logprobs in chunks if logprobs for token in logprobs.content]
    equal(told, whole.choices[0].logprobs.content, "logprobs")


@check
def chat_top_logprobs_need_logprobs():
    refused(openai.BadRequestError, lambda: ask(top_logprobs=2), "top_logprobs")


@check
def chat_stop():
    whole = text(ask(max_tokens=64))
    stop = re.findall("[a-z]{3}", whole)[1]
    for value in [stop, [stop, "\x00never"]]:
        answer = ask(max_tokens=64, stop=value)
        equal(text(answer), whole[: whole.index(stop)], "text")
        equal(answer.choices[0].finish_reason, "stop", "finish_reason")
    equal(joined(ask(max_tokens=64, stop=stop, stream=True)), whole[: whole.index(stop)], "stream")


@check
def chat_seed():
    equal(text(ask(seed=7)), text(ask(seed=7)), "second text")
    assert text(ask(seed=7)) != text(ask(seed=8)), "two seeds gave one text"
    fingerprints = {ask().system_fingerprint for _ in range(2)}
    assert len(fingerprints) == 1 and None not in fingerprints, fingerprints


@check
def chat_sampling_parameters():
    greedy = text(ask(temperature=0))
    equal(text(ask(temperature=0, seed=9)), greedy, "greedy text")
    equal(text(ask(top_p=0.000001)), greedy, "text with a small top_p")
    answer = ask(temperature=0, frequency_penalty=2, presence_penalty=2)
    one_of(answer.choices[0].finish_reason, ["stop", "length"])


@check
def chat_logit_bias():
    tokens = ask(logit_bias={"90": 100}, temperature=0, logprobs=True).choices[0].logprobs.content
    equal((len(tokens), len({token.token for token in tokens})), (16, 1), "tokens and different ones")


@check
def chat_system_and_developer():
    bare = ask().usage.prompt_tokens
    for role in ["system", "developer"]:
        answer = ask(messages=[{"role": role, "content": "Answer with a date."}, *MESSAGES])
        assert answer.usage.prompt_tokens > bare, f"{role}: {answer.usage}"


@check
def chat_content_of_parts():
    parts = [{"type": "text", "text": QUESTION}]
    equal(text(ask(messages=[{"role": "user", "content": parts}])), text(ask()), "text")
    two = [{"type": "text", "text": half} for half in (QUESTION[:9], QUESTION[9:])]
    assert ask(messages=[{"role": "user", "content": two}]).usage.prompt_tokens > 0


@check
def chat_image_is_refused():
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    error = refused(openai.BadRequestError, lambda: ask(messages=[{"role": "user", "content": [image]}]))
    assert error.param.startswith("messages[0].content[0]"), error.param


@check
def chat_audio_is_refused():
    refused(openai.BadRequestError, lambda: ask(modalities=["text", "audio"]), "modalities")


@check
def chat_answer_is_sent_back():
    """A script appends the answer's message, with all its fields, to the conversation."""
    follow_up = [*MESSAGES, ask().choices[0].message, {"role": "user", "content": "And the year?"}]
    assert ask(messages=follow_up).usage.prompt_tokens > ask().usage.prompt_tokens


@check
def chat_max_completion_tokens():
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_completion_tokens=3)
    assert answer.usage.completion_tokens <= 3, answer.usage


@check
def chat_without_max_tokens():
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, seed=1)
    one_of(answer.choices[0].finish_reason, ["stop", "length"])


@check
def chat_fields_that_change_no_answer():
    hints = {
        "user": "u1",
        "metadata": {"month": "march"},
        "store": False,
        "service_tier": "auto",
        "safety_identifier": "s1",
        "prompt_cache_key": "k1",
        "parallel_tool_calls": True,
    }
    equal(text(ask(**hints)), text(ask()), "text")


@check
def chat_verbosity():
    one_of(ask(verbosity="low").choices[0].finish_reason, ["stop", "length"])


@check
def chat_reasoning_effort():
    for effort in ["none", "minimal", "low", "medium", "high"]:
        answer = ask(reasoning_effort=effort)
        one_of(answer.choices[0].finish_reason, ["stop", "length"])
    error = refused(openai.BadRequestError, lambda: ask(reasoning_effort="extreme"))
    equal(error.param, "reasoning_effort", "param")


# Completions


def complete(**changes):
    """Asks for a short text."""
    return client.completions.create(**{"model": MODEL, "prompt": "Paid", "max_tokens": 8, "seed": 1} | changes)


@check
def completion():
    answer = complete()
    assert answer.id.startswith("cmpl-") and answer.object == "text_completion", answer
    one_of(answer.choices[0].finish_reason, ["stop", "length"])
    equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens)


@check
def completion_of_several_prompts():
    for prompt in [["Paid", "Due"], [[1, 2, 3], [4, 5]]]:
        answer = complete(prompt=prompt, n=2)
        equal([choice.index for choice in answer.choices], [0, 1, 2, 3], "indexes")
        chunks = list(complete(prompt=prompt, n=2, stream=True))
        for choice in answer.choices:
            pieces = [c.text for chunk in chunks for c in chunk.choices if c.index == choice.index]
            equal("".join(pieces), choice.text, "text of the stream")


@check
def completion_of_tokens():
    equal(complete(prompt=[1, 2, 3]).usage.prompt_tokens, 3, "prompt_tokens")


@check
def completion_stream():
    *chunks, last = complete(stream=True, stream_options={"include_usage": True})
    equal("".join(chunk.choices[0].text for chunk in chunks), complete().choices[0].text, "text")
    equal(last.usage.completion_tokens, complete().usage.completion_tokens, "completion_tokens")


@check
def completion_logprobs():
    logprobs = complete(logprobs=2).choices[0].logprobs
    equal((len(logprobs.tokens), len(logprobs.token_logprobs), logprobs.text_offset[0]), (8, 8, 0))


@check
def completion_echo():
    """Refused by name, or the text begins with the prompt."""
    try:
        assert complete(echo=True).choices[0].text.startswith("Paid")
    except openai.BadRequestError as error:
        equal(error.param, "echo", "param")


@check
def completion_suffix_is_refused():
    refused(openai.BadRequestError, lambda: complete(suffix="."), "suffix")


# Models, headers, time, errors


@check
def models():
    assert MODEL in [model.id for model in client.models.list()]
    model = client.models.retrieve(MODEL)
    equal((model.id, model.object), (MODEL, "model"))
    error = refused(openai.NotFoundError, lambda: client.models.retrieve("none"))
    equal((error.code, error.param), ("model_not_found", "model"))


@check
def request_id_of_an_answer():
    raw = client.chat.completions.with_raw_response.create(**SHORT)
    assert raw.headers.get("x-request-id"), "no x-request-id"
    assert raw.parse()._request_id == raw.headers["x-request-id"]
    raw = client.chat.completions.with_raw_response.create(**SHORT, extra_headers={"x-request-id": "mine-1"})
    equal(raw.headers["x-request-id"], "mine-1", "the caller's own id")


@check
def request_id_of_an_error():
    assert refused(openai.BadRequestError, lambda: ask(temperature=9)).request_id, "no request id"
    stranger = client.with_options(api_key="tm-0")
    assert refused(openai.AuthenticationError, stranger.models.list).request_id, "no request id at 401"


@check
def rate_limit_headers_can_be_read():
    """A key without limits has no such headers; those that there are are numbers and spans of time."""
    headers = client.chat.completions.with_raw_response.create(**SHORT).headers
    for name, value in headers.items():
        if name.startswith("x-ratelimit-"):
            pattern = r"(\d+h)?(\d+m)?(\d+(\.\d+)?m?s)?" if "-reset-" in name else r"\d+"
            assert re.fullmatch(pattern, value), f"{name}: {value}"


@check
def raw_stream_ends_with_done():
    with client.chat.completions.with_streaming_response.create(**SHORT, stream=True) as response:
        assert response.headers["content-type"].startswith("text/event-stream"), response.headers
        lines = [line for line in response.iter_lines() if line]
    equal(lines[-1], "data: [DONE]", "last line")


@check
def idempotency_key():
    header = {"Idempotency-Key": f"key-{uuid.uuid4()}"}
    first, second = ask(extra_headers=header), ask(extra_headers=header)
    equal((second.id, text(second)), (first.id, text(first)), "second answer")
    refused(openai.ConflictError, lambda: ask(seed=2, extra_headers=header))


@check
def timeout_of_the_client():
    hurried = client.with_options(timeout=0.2).chat.completions
    long = SHORT | {"max_tokens": 4000, "extra_body": {"ignore_eos": True}}
    refused(openai.APITimeoutError, lambda: hurried.create(**long))


@check
def timeout_of_the_caller():
    """A header tells the server when the whole answer is needed."""
    header = {"x-request-timeout": "30"}
    one_of(ask(extra_headers=header).choices[0].finish_reason, ["stop", "length"])


@check
async def many_calls_at_once():
    async with openai.AsyncOpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0) as many:
        calls = [many.chat.completions.create(**SHORT | {"seed": seed % 2}) for seed in range(20)]
        texts = [text(answer) for answer in await asyncio.gather(*calls)]
    equal(len(set(texts)), 2, "number of different texts")


@check
async def stream_that_is_closed():
    async with openai.AsyncOpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0) as many:
        stream = await many.chat.completions.create(**SHORT | {"max_tokens": 256}, stream=True)
        async for chunk in stream:
            equal(chunk.object, "chat.completion.chunk", "object")
            break
        await stream.close()


@check
def error_key():
    error = refused(openai.AuthenticationError, client.with_options(api_key="tm-0").models.list)
    equal((error.code, error.type), ("invalid_api_key", "authentication_error"))


@check
def error_model():
    refused(openai.NotFoundError, lambda: ask(model="none"), "model", "model_not_found")
    refused(openai.NotFoundError, lambda: ask(model="none", stream=True), "model", "model_not_found")


@check
def error_parameters():
    refused(openai.BadRequestError, lambda: ask(temperature=9), "temperature")
    refused(openai.BadRequestError, lambda: ask(max_tokens=-1), "max_tokens")
    refused(openai.BadRequestError, lambda: ask(messages=[]), "messages")
    refused(openai.BadRequestError, lambda: ask(extra_body={"color": 1}), "color", "unknown_parameter")
    role = [{"role": "king", "content": "x"}]
    refused(openai.BadRequestError, lambda: ask(messages=role), "messages[0].role")


@check
def error_context_length():
    long = [{"role": "user", "content": "x " * 20000}]
    for stream in [False, True]:
        error = refused(openai.BadRequestError, lambda: ask(messages=long, stream=stream))
        equal(error.code, "context_length_exceeded", "code")


@check
def error_too_large():
    huge = [{"role": "user", "content": "x" * (6 << 20)}]
    equal(refused(openai.APIStatusError, lambda: ask(messages=huge)).status_code, 413, "status")


# Embeddings


@check
def embeddings():
    # The package asks for base64 unless told otherwise, and decodes it.
    answer = client.embeddings.create(model=EMBEDDING_MODEL, input=[QUESTION, "Paid"])
    equal((answer.object, answer.model, len(answer.data)), ("list", EMBEDDING_MODEL, 2))
    equal([(one.object, one.index) for one in answer.data], [("embedding", 0), ("embedding", 1)])
    for one in answer.data:
        unit(one.embedding)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 2, answer.usage
    floats = client.embeddings.create(model=EMBEDDING_MODEL, input=[QUESTION, "Paid"], encoding_format="float")
    for one, other in zip(answer.data, floats.data):
        assert max(abs(a - b) for a, b in zip(one.embedding, other.embedding)) < 1e-7
    alone = client.embeddings.create(model=EMBEDDING_MODEL, input="Paid")
    equal(alone.data[0].embedding, answer.data[1].embedding, "the vector of a text alone")


@check
def embeddings_of_tokens():
    ids = client.post("/../tokenize", body={"model": EMBEDDING_MODEL, "prompt": "Paid"}, cast_to=object)["tokens"]
    answer = client.embeddings.create(model=EMBEDDING_MODEL, input=[ids, ids + ids])
    equal((len(answer.data), answer.usage.prompt_tokens), (2, 3 * len(ids)))
    alone = client.embeddings.create(model=EMBEDDING_MODEL, input=ids)
    equal(alone.data[0].embedding, answer.data[0].embedding)


@check
def embeddings_errors():
    create = client.embeddings.create
    error = openai.BadRequestError
    refused(error, lambda: create(model=EMBEDDING_MODEL, input="x", dimensions=8), "dimensions", "unsupported_value")
    refused(error, lambda: create(model=EMBEDDING_MODEL, input=""), "input")
    refused(error, lambda: create(model=EMBEDDING_MODEL, input=["x", ""]), "input[1]")
    refused(error, lambda: create(model=EMBEDDING_MODEL, input=["x"] * 2049), "input")
    refused(error, lambda: create(model=EMBEDDING_MODEL, input=[1] * 5000), "input", "context_length_exceeded")
    refused(error, lambda: create(model=MODEL, input="x"), "model", "unsupported_value")
    refused(error, lambda: ask(model=EMBEDDING_MODEL), "model", "unsupported_value")
    completion = client.completions.create
    refused(error, lambda: completion(model=EMBEDDING_MODEL, prompt="x"), "model", "unsupported_value")


if __name__ == "__main__":
    run()
