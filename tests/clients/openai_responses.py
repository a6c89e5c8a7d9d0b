"""The `openai` package: responses. See `checks.py` for how to run it."""

import json
import time

import openai

from checks import (
    ARGUMENTS,
    BASE_URL,
    CLOSE,
    KEY,
    MODEL,
    QUESTION,
    REQUIRED,
    STRUCTURED_TOKENS,
    TOOLS,
    Date,
    check,
    equal,
    one_of,
    refused,
    run,
)

client = openai.OpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0, timeout=60)
SHORT = {"model": MODEL, "input": QUESTION, "max_output_tokens": 16, "temperature": 0}
STRUCTURED = {"model": MODEL, "input": QUESTION, "max_output_tokens": STRUCTURED_TOKENS, "temperature": 0.5}
# A tool of a response is flat.
FUNCTIONS = [{"type": "function", "strict": True} | tool["function"] for tool in TOOLS]
NAMED = {"type": "function", "name": "Weather"}
SCHEMA = {"type": "json_schema", "name": "date", "strict": True, "schema": Date.model_json_schema()}


def ask(**changes):
    """Asks for a short response."""
    return client.responses.create(**SHORT | changes)


def valid_calls(response):
    """Returns the calls of a response, each of them with arguments that fit its tool."""
    calls = [item for item in response.output if item.type == "function_call"]
    assert calls, f"no calls in {response.output!r}"
    for call in calls:
        assert call.call_id, call
        ARGUMENTS[call.name].model_validate_json(call.arguments)
    return calls


@check
def response_plain():
    response = ask()
    assert response.id.startswith("resp_"), response.id
    equal((response.object, response.model, response.error), ("response", MODEL, None))
    one_of(response.status, ["completed", "incomplete"], "status")
    if response.status == "incomplete":
        equal(response.incomplete_details.reason, "max_output_tokens", "reason")
    message = response.output[0]
    equal((message.type, message.role, message.content[0].type), ("message", "assistant", "output_text"))
    equal(message.content[0].annotations, [], "annotations")
    assert response.output_text and abs(response.created_at - time.time()) < 3600, response
    usage = response.usage
    assert 0 < usage.output_tokens <= 16 and usage.input_tokens > 0, usage
    equal(usage.total_tokens, usage.input_tokens + usage.output_tokens, "total_tokens")
    assert usage.input_tokens_details.cached_tokens >= 0, usage
    assert usage.output_tokens_details.reasoning_tokens >= 0, usage


@check
def response_repeats_the_request():
    response = ask(metadata={"month": "march"}, instructions="Be short.", top_p=0.5)
    equal(response.metadata, {"month": "march"}, "metadata")
    equal((response.instructions, response.temperature, response.top_p), ("Be short.", 0, 0.5))
    equal((response.max_output_tokens, response.tools, response.tool_choice), (16, [], "auto"))
    equal((response.parallel_tool_calls, response.text.format.type), (True, "text"))


@check
def response_instructions_are_in_the_prompt():
    instructed = ask(instructions="Answer with a date, with nothing else.")
    assert instructed.usage.input_tokens > ask().usage.input_tokens, instructed.usage


@check
def response_forms_of_input():
    text = ask().output_text
    parts = [{"role": "user", "content": [{"type": "input_text", "text": QUESTION}]}]
    typed = [{"type": "message", "role": "user", "content": QUESTION}]
    for given in [parts, typed, [{"role": "user", "content": QUESTION}]]:
        equal(ask(input=given).output_text, text, "text")
    developer = [{"role": "developer", "content": "Be short."}, *typed]
    assert ask(input=developer).usage.input_tokens > ask().usage.input_tokens


@check
def response_output_is_sent_back():
    first = ask()
    turn = [{"role": "user", "content": QUESTION}, *first.output, {"role": "user", "content": "And the year?"}]
    assert ask(input=turn).usage.input_tokens > first.usage.input_tokens


@check
def response_fields_that_change_no_answer():
    hints = {
        "user": "u1",
        "service_tier": "auto",
        "safety_identifier": "s1",
        "prompt_cache_key": "k1",
        "truncation": "disabled",
        "parallel_tool_calls": True,
        "max_tool_calls": 3,
        "reasoning": {"effort": "low"},
    }
    assert ask(**hints).output_text


@check
def response_input_tokens():
    count = lambda **changes: client.responses.input_tokens.count(**{"model": MODEL, "input": QUESTION} | changes)
    counted = count()
    equal((counted.object, counted.input_tokens), ("response.input_tokens", ask().usage.input_tokens))
    assert count(instructions="Be short.").input_tokens > counted.input_tokens


@check
def response_logprobs():
    response = ask(include=["message.output_text.logprobs"], top_logprobs=2)
    tokens = response.output[0].content[0].logprobs
    equal(len(tokens), response.usage.output_tokens, "number of tokens")
    equal({len(token.top_logprobs) for token in tokens}, {2}, "number of top_logprobs")


@check
def response_stream():
    events = list(ask(stream=True))
    equal([event.sequence_number for event in events], list(range(len(events))), "sequence numbers")
    kinds = [event.type.removeprefix("response.") for event in events]
    equal(kinds[:4], ["created", "in_progress", "output_item.added", "content_part.added"], "first events")
    equal(kinds[-4:-1], ["output_text.done", "content_part.done", "output_item.done"], "events at the end")
    one_of(kinds[-1], ["completed", "incomplete"], "last event")
    equal(set(kinds[4:-4]), {"output_text.delta"}, "events between")
    text = "".join(event.delta for event in events[4:-4])
    last = events[-1].response
    equal([events[-4].text, last.output_text, ask().output_text], [text] * 3, "texts")
    equal((events[0].response.status, last.status), ("in_progress", kinds[-1]), "status")
    equal(last.usage.output_tokens, ask().usage.output_tokens, "output_tokens")
    ids = {event.item_id for event in events[3:-2]} | {last.output[0].id}
    equal(len(ids), 1, "number of item ids")


@check
def response_json_schema():
    response = client.responses.create(**STRUCTURED, text={"format": SCHEMA})
    equal(response.status, "completed", "status")
    Date.model_validate_json(response.output_text)
    equal(response.text.format.type, "json_schema", "format")


@check
def response_json_object():
    response = ask(text={"format": {"type": "json_object"}}, extra_body={"logit_bias": CLOSE})
    equal(json.loads(response.output_text), {}, "object")


@check
def response_parse():
    response = client.responses.parse(**STRUCTURED, text_format=Date)
    assert isinstance(response.output_parsed, Date), response.output


@check
def response_stream_helper():
    with client.responses.stream(**STRUCTURED, text_format=Date) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert isinstance(final.output_parsed, Date), final.output
    equal("".join(deltas), final.output_text, "text")


@check
def response_tools_required():
    response = client.responses.create(**STRUCTURED, tools=FUNCTIONS, **REQUIRED)
    equal(response.status, "completed", "status")
    valid_calls(response)
    equal([tool.name for tool in response.tools], ["Weather", "Clock"], "tools")


@check
def response_tools_named():
    response = client.responses.create(**STRUCTURED, tools=FUNCTIONS, tool_choice=NAMED)
    equal([call.name for call in valid_calls(response)], ["Weather"], "names")


@check
def response_tools_none_and_auto():
    for choice in ["none", "auto"]:
        response = ask(tools=FUNCTIONS, tool_choice=choice)
        one_of(response.status, ["completed", "incomplete"], choice)
    equal({item.type for item in ask(tools=FUNCTIONS, tool_choice="none").output}, {"message"}, "items")


@check
def response_tools_in_stream():
    events = list(client.responses.create(**STRUCTURED, tools=FUNCTIONS, tool_choice=NAMED, stream=True))
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    equal(["".join(deltas)], [event.arguments for event in done], "arguments")
    equal([call.arguments for call in valid_calls(events[-1].response)], ["".join(deltas)], "last event")
    added = [event.item for event in events if event.type == "response.output_item.added"]
    equal([(item.type, item.name, item.arguments) for item in added], [("function_call", "Weather", "")])


@check
def response_tools_whole_turn():
    first = client.responses.create(**STRUCTURED, tools=FUNCTIONS, **REQUIRED)
    outputs = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"} for call in valid_calls(first)
    ]
    turn = [{"role": "user", "content": QUESTION}, *first.output, *outputs]
    by_hand = ask(input=turn, tools=FUNCTIONS, tool_choice="none")
    by_id = ask(input=outputs, previous_response_id=first.id, tools=FUNCTIONS, tool_choice="none")
    equal(by_id.usage.input_tokens, by_hand.usage.input_tokens, "input_tokens")
    equal(by_id.output_text, by_hand.output_text, "text")


@check
def response_previous():
    first = ask()
    second = ask(input="And the year?", previous_response_id=first.id)
    equal(second.previous_response_id, first.id, "previous_response_id")
    assert second.usage.input_tokens > first.usage.input_tokens, second.usage
    third = ask(input="And the day?", previous_response_id=second.id)
    assert third.usage.input_tokens > second.usage.input_tokens, third.usage


@check
def response_previous_that_does_not_exist():
    kinds = (openai.BadRequestError, openai.NotFoundError)
    call = lambda: ask(previous_response_id="resp_00000000000000000000000000000000")
    equal(refused(kinds, call).param, "previous_response_id", "param")


@check
def response_is_stored():
    response = ask(metadata={"month": "march"})
    again = client.responses.retrieve(response.id)
    equal((again.output_text, again.metadata), (response.output_text, {"month": "march"}), "stored response")
    items = client.responses.input_items.list(response.id).data
    equal([(item.role, item.content[0].text) for item in items], [("user", QUESTION)], "input items")
    client.responses.delete(response.id)
    refused(openai.NotFoundError, lambda: client.responses.retrieve(response.id))
    refused(openai.NotFoundError, lambda: client.responses.delete(response.id))


@check
def response_that_is_not_stored():
    response = ask(store=False)
    refused(openai.NotFoundError, lambda: client.responses.retrieve(response.id))


@check
def response_in_the_background():
    response = ask(background=True)
    one_of(response.status, ["queued", "in_progress", "completed", "incomplete"], "status")
    started = time.monotonic()
    while response.status in ("queued", "in_progress"):
        assert time.monotonic() - started < 30, response.status
        time.sleep(0.05)
        response = client.responses.retrieve(response.id)
    equal(response.output_text, ask().output_text, "text")


@check
def response_that_is_cancelled():
    long = ask(background=True, max_output_tokens=6000, extra_body={"ignore_eos": True})
    equal(client.responses.cancel(long.id).status, "cancelled", "status")
    equal(client.responses.retrieve(long.id).status, "cancelled", "status afterwards")
    whole = ask()
    refused(openai.BadRequestError, lambda: client.responses.cancel(whole.id))


@check
def response_errors():
    refused(openai.BadRequestError, lambda: ask(temperature=9), "temperature")
    refused(openai.NotFoundError, lambda: ask(model="none"), "model", "model_not_found")
    refused(openai.NotFoundError, lambda: client.responses.retrieve("resp_0"))
    search = [{"type": "web_search"}]
    error = refused(openai.BadRequestError, lambda: ask(tools=search))
    assert error.param.startswith("tools[0]"), error.param
    image = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}]}]
    error = refused(openai.BadRequestError, lambda: ask(input=image))
    assert error.param.startswith("input[0]"), error.param


@check
def response_request_id():
    assert ask()._request_id, "no request id"


@check
async def response_async():
    async with openai.AsyncOpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0) as many:
        stream = await many.responses.create(**SHORT, stream=True)
        deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        whole = await many.responses.create(**SHORT)
    equal("".join(deltas), whole.output_text, "text")


if __name__ == "__main__":
    run()
