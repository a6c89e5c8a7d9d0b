"""The `openai` package: structured output and tools. See `checks.py` for how to run it."""

import json

import openai

from chats import ask, client, joined, text
from checks import (
    ARGUMENTS,
    CLOSE,
    MESSAGES,
    MODEL,
    NAMED,
    REQUIRED,
    STRUCTURED_TOKENS,
    TOOLS,
    Clock,
    Date,
    Trip,
    Weather,
    check,
    equal,
    one_of,
    refused,
    run,
)

STRUCTURED = {"model": MODEL, "messages": MESSAGES, "max_tokens": STRUCTURED_TOKENS, "seed": 1}
SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "date", "strict": True, "schema": Date.model_json_schema()},
}
PARSED_TOOLS = [openai.pydantic_function_tool(Weather), openai.pydantic_function_tool(Clock)]
HISTORY_OF_A_CALL = [
    *MESSAGES,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "Weather", "arguments": '{"city": "Paris", "days": 2}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
]


def valid_calls(message):
    """Returns the calls of a message, each of them with arguments that fit its tool."""
    calls = message.tool_calls
    assert calls, f"no calls in {message!r}"
    for call in calls:
        assert call.id and call.type == "function", call
        ARGUMENTS[call.function.name].model_validate_json(call.function.arguments)
    equal(len({call.id for call in calls}), len(calls), "number of different ids")
    return calls


# Structured output


@check
def json_object():
    answer = ask(response_format={"type": "json_object"}, logit_bias=CLOSE)
    equal((json.loads(text(answer)), answer.choices[0].finish_reason), ({}, "stop"))


@check
def text_format():
    equal(text(ask(response_format={"type": "text"})), text(ask()), "text")


@check
def json_schema():
    answer = client.chat.completions.create(**STRUCTURED, n=2, response_format=SCHEMA)
    for choice in answer.choices:
        Date.model_validate_json(choice.message.content)
        equal(choice.finish_reason, "stop", "finish_reason")


@check
def json_schema_in_stream():
    chunks = list(client.chat.completions.create(**STRUCTURED, response_format=SCHEMA, stream=True))
    whole = client.chat.completions.create(**STRUCTURED, response_format=SCHEMA)
    equal(joined(chunks), text(whole), "text")


@check
def json_schema_that_is_not_supported():
    schema = {"name": "bad", "schema": {"type": "no such type"}}
    call = lambda: ask(response_format={"type": "json_schema", "json_schema": schema})
    error = refused(openai.BadRequestError, call)
    assert error.param.startswith("response_format"), error.param


@check
def parse():
    answer = client.chat.completions.parse(**STRUCTURED, response_format=Date)
    assert isinstance(answer.choices[0].message.parsed, Date), answer


@check
def parse_of_a_nested_class():
    answer = client.chat.completions.parse(**STRUCTURED, response_format=Trip)
    assert isinstance(answer.choices[0].message.parsed, Trip), answer


@check
def parse_of_a_cut_answer():
    call = lambda: client.chat.completions.parse(**STRUCTURED | {"max_tokens": 2}, response_format=Date)
    try:
        call()
    except openai.LengthFinishReasonError as error:
        equal(error.completion.usage.completion_tokens, 2, "completion_tokens")
    else:
        raise AssertionError("no LengthFinishReasonError")


@check
def parse_of_a_stream():
    with client.chat.completions.stream(**STRUCTURED, response_format=Date) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds, kinds
    assert isinstance(final.choices[0].message.parsed, Date), final


# Tools


@check
def tools_auto():
    answer = client.chat.completions.create(**STRUCTURED, tools=TOOLS)
    choice = answer.choices[0]
    one_of(choice.finish_reason, ["stop", "length", "tool_calls"])
    equal(choice.finish_reason == "tool_calls", bool(choice.message.tool_calls), "has calls")


@check
def tools_are_in_the_prompt():
    with_tools, without = ask(tools=TOOLS).usage, ask().usage
    assert with_tools.prompt_tokens > without.prompt_tokens + 50, (with_tools, without)


@check
def tools_none():
    answer = ask(tools=TOOLS, tool_choice="none")
    equal(answer.choices[0].message.tool_calls, None, "tool_calls")
    one_of(answer.choices[0].finish_reason, ["stop", "length"])


@check
def tools_required():
    for seed in range(4):
        answer = client.chat.completions.create(**STRUCTURED | {"seed": seed}, tools=TOOLS, **REQUIRED)
        equal(answer.choices[0].finish_reason, "tool_calls", "finish_reason")
        one_of(answer.choices[0].message.content, [None, ""], "content")
        equal(len(valid_calls(answer.choices[0].message)), 1, "number of calls")


@check
def tools_in_parallel():
    """Several calls, which the limit of tokens may cut."""
    for seed in range(4):
        answer = client.chat.completions.create(
            **STRUCTURED | {"seed": seed}, tools=TOOLS, tool_choice="required", parallel_tool_calls=True
        )
        choice = answer.choices[0]
        one_of(choice.finish_reason, ["tool_calls", "length"], "finish_reason")
        if choice.finish_reason == "length":
            choice.message.tool_calls.pop()
        if choice.message.tool_calls:
            valid_calls(choice.message)


@check
def tools_named():
    answer = client.chat.completions.create(**STRUCTURED, tools=TOOLS, tool_choice=NAMED)
    # OpenAI ends a call that was asked for by name with `stop`.
    one_of(answer.choices[0].finish_reason, ["stop", "tool_calls"], "finish_reason")
    equal([call.function.name for call in valid_calls(answer.choices[0].message)], ["Weather"], "names")


@check
def tools_several_choices():
    answer = client.chat.completions.create(**STRUCTURED, n=2, tools=TOOLS, **REQUIRED)
    ids = [call.id for choice in answer.choices for call in valid_calls(choice.message)]
    equal(len(set(ids)), len(ids), "number of different ids")


@check
def tools_in_stream():
    asked = STRUCTURED | REQUIRED | {"tools": TOOLS}
    whole = client.chat.completions.create(**asked).choices[0]
    calls, reasons = {}, []
    for chunk in client.chat.completions.create(**asked, stream=True):
        reasons.append(chunk.choices[0].finish_reason)
        deltas = chunk.choices[0].delta.tool_calls or []
        assert len(deltas) <= 1, f"LlamaIndex reads the first delta of a chunk only: {deltas}"
        for delta in deltas:
            if delta.index not in calls:
                assert delta.id and delta.type == "function" and delta.function.name, f"first delta: {delta}"
                calls[delta.index] = [delta.function.name, ""]
            else:
                one_of(delta.function.name, [None, ""], "name in a later delta")
            calls[delta.index][1] += delta.function.arguments or ""
    wanted = [[call.function.name, call.function.arguments] for call in whole.message.tool_calls]
    equal([calls[index] for index in sorted(calls)], wanted, "calls")
    equal((reasons[-1], set(reasons[:-1])), ("tool_calls", {None}), "finish reasons")


@check
def tools_in_stream_helper():
    with client.chat.completions.stream(**STRUCTURED, tools=PARSED_TOOLS, **REQUIRED) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds, kinds
    for call in final.choices[0].message.tool_calls:
        assert isinstance(call.function.parsed_arguments, ARGUMENTS[call.function.name]), call


@check
def tools_with_a_nested_class():
    trip = REQUIRED | {"tools": [openai.pydantic_function_tool(Trip)]}
    answer = client.chat.completions.parse(**STRUCTURED, **trip)
    for call in answer.choices[0].message.tool_calls:
        assert isinstance(call.function.parsed_arguments, Trip), call


@check
def tools_without_parameters():
    empty = {"type": "object", "properties": {}, "additionalProperties": False}
    for function in [{"name": "now"}, {"name": "now", "parameters": empty}]:
        tools = [{"type": "function", "function": function}]
        answer = client.chat.completions.create(**STRUCTURED, tools=tools, **REQUIRED)
        equal(json.loads(answer.choices[0].message.tool_calls[0].function.arguments), {}, "arguments")


@check
def tools_parsed():
    answer = client.chat.completions.parse(**STRUCTURED, tools=PARSED_TOOLS, **REQUIRED)
    for call in answer.choices[0].message.tool_calls:
        assert isinstance(call.function.parsed_arguments, ARGUMENTS[call.function.name]), call


@check
def tools_history():
    """An assistant's message without content, and a tool's answer."""
    assert ask(messages=HISTORY_OF_A_CALL).usage.prompt_tokens > 0
    assert ask(messages=HISTORY_OF_A_CALL, tools=TOOLS).usage.prompt_tokens > 0
    *earlier, answer = HISTORY_OF_A_CALL
    parts = answer | {"content": [{"type": "text", "text": "sunny"}]}
    equal(ask(messages=[*earlier, parts]).usage.prompt_tokens, ask(messages=HISTORY_OF_A_CALL).usage.prompt_tokens)


@check
def tools_whole_turn():
    first = client.chat.completions.create(**STRUCTURED, tools=TOOLS, **REQUIRED)
    message = first.choices[0].message
    messages = [*MESSAGES, message]
    for call in valid_calls(message):
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
    second = ask(messages=messages, tools=TOOLS, tool_choice="none")
    # Not compared with the first prompt: with `none`, a server may leave the tools out.
    assert second.usage.prompt_tokens > ask().usage.prompt_tokens, second.usage


@check
def tools_choice_of_an_unknown_one():
    unknown = {"type": "function", "function": {"name": "nothing"}}
    error = refused(openai.BadRequestError, lambda: ask(tools=TOOLS, tool_choice=unknown))
    assert error.param.startswith("tool_choice"), error.param


@check
def tools_choice_without_tools():
    error = refused(openai.BadRequestError, lambda: ask(tool_choice="required"))
    assert error.param.startswith("tool"), error.param


@check
def tools_with_a_schema_that_is_not_supported():
    bad = {"type": "function", "function": {"name": "bad", "parameters": {"type": "no such type"}}}
    error = refused(openai.BadRequestError, lambda: ask(tools=[bad], tool_choice="required"))
    assert error.param.startswith("tools[0].function"), error.param


if __name__ == "__main__":
    run()
