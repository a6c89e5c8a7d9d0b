"""The `anthropic` package: messages, whole and streamed, tools, errors and counts. See `checks.py` for how to run it."""

import json
import urllib.error
import urllib.request

import anthropic

from checks import (
    ARGUMENTS,
    BASE_URL,
    KEY,
    MODEL,
    QUESTION,
    STRUCTURED_TOKENS,
    TOOLS,
    Clock,
    check,
    equal,
    one_of,
    refused,
    run,
)

# The package adds /v1 itself.
SERVER = BASE_URL.removesuffix("/v1")
client = anthropic.Anthropic(base_url=SERVER, api_key=KEY, max_retries=0, timeout=60)
MESSAGES = [{"role": "user", "content": QUESTION}]
# The package has no parameter for the temperature any more, and the server still does.
GREEDY = {"temperature": 0}
SHORT = {"model": MODEL, "messages": MESSAGES, "max_tokens": 16, "extra_body": GREEDY}
STRUCTURED = {"model": MODEL, "messages": MESSAGES, "max_tokens": STRUCTURED_TOKENS, "extra_body": {"temperature": 0.5}}
FUNCTIONS = [
    {"name": f["name"], "description": f["description"], "input_schema": f["parameters"]}
    for f in (tool["function"] for tool in TOOLS)
]
ONE_CALL = {"disable_parallel_tool_use": True}


def ask(also={}, **changes):
    """Asks for a short message; `also` has parameters that the package does not know."""
    return client.messages.create(**SHORT | {"extra_body": GREEDY | also} | changes)


def calls_of(message):
    """Returns the calls of a message, each of them with input that fits its tool."""
    calls = [block for block in message.content if block.type == "tool_use"]
    assert calls, f"no calls in {message!r}"
    for call in calls:
        assert call.id.startswith("toolu_"), call.id
        ARGUMENTS[call.name].model_validate(call.input)
    return calls


def text_of(message):
    return "".join(block.text for block in message.content if block.type == "text")


@check
def message_plain():
    message = ask()
    assert message.id.startswith("msg_"), message.id
    equal((message.type, message.role, message.model), ("message", "assistant", MODEL))
    one_of(message.stop_reason, ["end_turn", "max_tokens"], "stop_reason")
    equal(message.content[0].type, "text", "type of the block")
    usage = message.usage
    read = usage.input_tokens + usage.cache_read_input_tokens
    assert read > 0 and 0 < usage.output_tokens <= 16, usage
    assert message._request_id.startswith("req_"), message._request_id


@check
async def message_async():
    own = anthropic.AsyncAnthropic(base_url=SERVER, auth_token=KEY, max_retries=0)
    message = await own.messages.create(**SHORT)
    equal(text_of(message), text_of(ask()), "text")


@check
def message_cut_at_its_limit():
    message = ask({"ignore_eos": True}, max_tokens=3)
    equal((message.stop_reason, message.usage.output_tokens), ("max_tokens", 3))


@check
def message_with_a_stop_sequence():
    whole = text_of(ask({"ignore_eos": True}))
    middle = whole[len(whole) // 2]
    message = ask({"ignore_eos": True}, stop_sequences=["never in an answer", middle])
    equal((message.stop_reason, message.stop_sequence), ("stop_sequence", middle))
    equal(text_of(message), whole[: whole.index(middle)], "text")


@check
def message_of_blocks_and_instructions():
    blocks = [{"type": "text", "text": QUESTION, "cache_control": {"type": "ephemeral"}}]
    instructed = {"system": [{"type": "text", "text": "Be brief."}], "metadata": {"user_id": "u"}}
    of_blocks = ask(messages=[{"role": "user", "content": blocks}], **instructed)
    plain = ask(system="Be brief.")
    equal(text_of(of_blocks), text_of(plain), "text")
    assert text_of(plain) and plain.usage != ask().usage, "instructions are part of the prompt"


@check
def stream_adds_up_to_the_message():
    whole = ask()
    with client.messages.stream(**SHORT) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    equal(text, text_of(whole), "text")
    equal((text_of(final), final.stop_reason), (text, whole.stop_reason))
    equal(final.usage.output_tokens, whole.usage.output_tokens, "output_tokens")
    read = lambda usage: usage.input_tokens + usage.cache_read_input_tokens
    equal(read(final.usage), read(whole.usage), "input tokens")


@check
def stream_has_the_events_of_the_api():
    kinds = [event.type for event in ask(stream=True)]
    equal(kinds[0], "message_start")
    equal(kinds[-3:], ["content_block_stop", "message_delta", "message_stop"])
    one_of("content_block_delta", kinds)
    lines = client.post("/v1/messages", body={"model": MODEL, "messages": MESSAGES, "max_tokens": 16, "stream": True}, cast_to=str).splitlines()
    named = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    typed = [json.loads(line.removeprefix("data: "))["type"] for line in lines if line.startswith("data: ")]
    equal(named, typed, "names of the events")
    one_of("ping", named)


@check
def tool_is_called():
    message = client.messages.create(**STRUCTURED, tools=FUNCTIONS, tool_choice={"type": "any"} | ONE_CALL)
    equal((message.stop_reason, len(calls_of(message))), ("tool_use", 1))


@check
def tool_is_named():
    message = client.messages.create(**STRUCTURED, tools=FUNCTIONS, tool_choice={"type": "tool", "name": "Weather"})
    equal([call.name for call in calls_of(message)], ["Weather"])


@check
def tool_call_is_streamed():
    choice = {"type": "any"} | ONE_CALL
    with client.messages.stream(**STRUCTURED, tools=FUNCTIONS, tool_choice=choice) as stream:
        parts = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    equal(json.loads("".join(parts)), calls_of(final)[0].input, "input")
    equal(final.stop_reason, "tool_use")


@check
def result_of_a_tool_is_sent_back():
    first = client.messages.create(**STRUCTURED, tools=FUNCTIONS, tool_choice={"type": "any"} | ONE_CALL)
    call = calls_of(first)[0]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]}
    history = [*MESSAGES, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    message = ask(messages=history, tools=FUNCTIONS, tool_choice={"type": "none"})
    equal([block.type for block in message.content], ["text"], "blocks")
    counted = lambda messages: client.messages.count_tokens(model=MODEL, messages=messages).input_tokens
    assert counted(history) > counted(MESSAGES)


@check
def output_matches_a_schema():
    # The package leaves bounds of numbers out of schemas.
    message = client.messages.parse(**STRUCTURED, output_format=Clock)
    one_of(message.parsed_output.zone, ["UTC", "CET"], "zone")


@check
def tokens_are_counted():
    usage = ask().usage
    counted = client.messages.count_tokens(model=MODEL, messages=MESSAGES)
    equal(counted.input_tokens, usage.input_tokens + usage.cache_read_input_tokens, "input_tokens")
    with_tools = client.messages.count_tokens(model=MODEL, messages=MESSAGES, tools=FUNCTIONS, system="Be brief.")
    assert with_tools.input_tokens > counted.input_tokens, with_tools


@check
def models_are_listed():
    models = list(client.models.list())
    assert MODEL in [model.id for model in models], models
    one = client.models.retrieve(MODEL)
    equal((one.type, one.id, one.display_name), ("model", MODEL, MODEL))
    assert one.created_at.year >= 2024, one
    failed(anthropic.NotFoundError, lambda: client.models.retrieve("none"), "not_found_error", "none")


def failed(kind, call, error, text):
    """Fails unless a call is refused with this type of error, and a message with this text."""
    found = refused(kind, call)
    equal((found.body["type"], found.body["error"]["type"]), ("error", error))
    assert text in found.body["error"]["message"], found.body
    equal(found.body["request_id"], found.request_id, "request_id")


@check
def errors_have_their_shape():
    bad = anthropic.BadRequestError
    invalid = "invalid_request_error"
    image = {"type": "image", "source": {"type": "url", "url": "https://images.example/a.png"}}
    failed(bad, lambda: ask(messages=[{"role": "user", "content": [image]}]), invalid, "messages[0].content[0].type")
    failed(bad, lambda: ask({"temperature": 9}), invalid, "temperature")
    failed(bad, lambda: ask({"max_tokens": None}), invalid, "max_tokens")
    failed(bad, lambda: ask(tools=[{"type": "web_search_20250305", "name": "w"}]), invalid, "tools[0].type")
    failed(bad, lambda: ask({"colour": 1}), invalid, "colour")
    failed(bad, lambda: ask(extra_headers={"anthropic-version": "1999-01-01"}), invalid, "anthropic-version")
    failed(anthropic.NotFoundError, lambda: ask(model="other"), "not_found_error", "other")
    failed(bad, lambda: client.messages.count_tokens(model=MODEL, messages=[]), invalid, "messages")
    stranger = anthropic.Anthropic(base_url=SERVER, api_key="tm-0", max_retries=0)
    call = lambda: stranger.messages.create(**SHORT)
    failed(anthropic.AuthenticationError, call, "authentication_error", "no valid API key")
    long = [{"role": "user", "content": "word " * 20000}]
    failed(bad, lambda: ask(messages=long), invalid, "tokens")


@check
def unknown_paths_have_it_too():
    for method, path, status in [("GET", "/v1/messages", 405), ("GET", "/v1/messages/none", 404)]:
        request = urllib.request.Request(SERVER + path, method=method, headers={"x-api-key": KEY})
        found = refused(urllib.error.HTTPError, lambda: urllib.request.urlopen(request))
        equal((found.code, json.load(found)["type"]), (status, "error"), path)


run()
