"""LiteLLM: the package `litellm`. See `checks.py` for how to run it.

The name of the file ends with an underscore, because a script hides a package of the same name.
"""

import io
import json
import os
import time

from checks import (
    ARGUMENTS,
    BASE_URL,
    CLOSE,
    EMBEDDING_MODEL,
    KEY,
    MESSAGES,
    MODEL,
    NAMED,
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
    unit,
)

# Otherwise the package loads a list of prices from the internet.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm  # noqa: E402

litellm.telemetry = False
litellm.suppress_debug_info = True
SERVER = {"api_base": BASE_URL, "api_key": KEY, "num_retries": 0, "timeout": 60}


def ask(**changes):
    """Asks for a short answer."""
    short = {"model": f"openai/{MODEL}", "messages": MESSAGES, "max_tokens": 16, "seed": 1}
    return litellm.completion(**SERVER | short | changes)


def structured(**changes):
    """Asks with tokens enough for structured output."""
    return ask(max_tokens=STRUCTURED_TOKENS, **changes)


def text(answer):
    """Returns the text of the first choice."""
    return answer.choices[0].message.content


def valid_calls(answer):
    """Returns the calls of an answer, each of them with arguments that fit its tool."""
    calls = answer.choices[0].message.tool_calls
    assert calls, answer
    for call in calls:
        ARGUMENTS[call.function.name].model_validate_json(call.function.arguments)
    return calls


@check
def completion():
    answer = ask()
    assert answer.id.startswith("chatcmpl-") and text(answer), answer
    one_of(answer.choices[0].finish_reason, ["stop", "length"])
    equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens)


@check
def completion_as_of_vllm():
    """Another provider of LiteLLM's: a server like vLLM's."""
    equal(text(ask(model=f"hosted_vllm/{MODEL}")), text(ask()), "text")


@check
def stream():
    chunks = list(ask(stream=True))
    equal("".join(chunk.choices[0].delta.content or "" for chunk in chunks), text(ask()), "text")
    one_of(chunks[-1].choices[0].finish_reason, ["stop", "length"])


@check
def stream_with_usage():
    chunks = list(ask(stream=True, stream_options={"include_usage": True}))
    whole = litellm.stream_chunk_builder(chunks)
    equal((text(whole), whole.usage.total_tokens), (text(ask()), ask().usage.total_tokens))


@check
async def acompletion():
    short = {"model": f"openai/{MODEL}", "messages": MESSAGES, "max_tokens": 16, "seed": 1}
    answer = await litellm.acompletion(**SERVER, **short)
    chunks = await litellm.acompletion(**SERVER, **short, stream=True)
    equal("".join([chunk.choices[0].delta.content or "" async for chunk in chunks]), text(answer), "text")


@check
def answer_is_sent_back():
    """LiteLLM sends a message of its own class with a field of its own, `provider_specific_fields`."""
    for provider in ["openai", "hosted_vllm"]:
        asked = {"model": f"{provider}/{MODEL}"}
        follow_up = [*MESSAGES, ask(**asked).choices[0].message, {"role": "user", "content": "And the year?"}]
        assert ask(**asked, messages=follow_up).usage.prompt_tokens > ask().usage.prompt_tokens


@check
def several_choices_and_logprobs():
    answer = ask(n=2, logprobs=True, top_logprobs=2)
    equal([choice.index for choice in answer.choices], [0, 1], "indexes")
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2, answer


@check
def fields_that_change_no_answer():
    equal(text(ask(user="u1", metadata={"month": "march"}, store=False)), text(ask()), "text")


@check
def reasoning_effort():
    answer = ask(reasoning_effort="low", allowed_openai_params=["reasoning_effort"])
    one_of(answer.choices[0].finish_reason, ["stop", "length"])


@check
def response_format_of_a_class():
    Date.model_validate_json(text(structured(response_format=Date)))


@check
def response_format_json_schema():
    schema = {"name": "date", "strict": True, "schema": Date.model_json_schema()}
    answer = structured(response_format={"type": "json_schema", "json_schema": schema})
    Date.model_validate_json(text(answer))


@check
def response_format_json_object():
    equal(json.loads(text(ask(response_format={"type": "json_object"}, logit_bias=CLOSE))), {}, "object")


@check
def tools_required():
    answer = structured(tools=TOOLS, **REQUIRED)
    valid_calls(answer)
    equal(answer.choices[0].finish_reason, "tool_calls", "finish_reason")


@check
def tools_named():
    calls = valid_calls(structured(tools=TOOLS, tool_choice=NAMED))
    equal([call.function.name for call in calls], ["Weather"], "names")


@check
def tools_in_stream():
    asked = REQUIRED | {"tools": TOOLS}
    built = litellm.stream_chunk_builder(list(structured(**asked, stream=True)))
    told = [(call.function.name, call.function.arguments) for call in valid_calls(built)]
    whole = structured(**asked).choices[0].message.tool_calls
    equal(told, [(call.function.name, call.function.arguments) for call in whole], "calls")


@check
def tools_whole_turn():
    first = structured(tools=TOOLS, **REQUIRED)
    messages = [*MESSAGES, first.choices[0].message]
    for call in valid_calls(first):
        messages.append({"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": "sunny"})
    assert ask(messages=messages, tools=TOOLS).usage.prompt_tokens > first.usage.prompt_tokens


@check
def text_completion():
    prompt = {"model": f"text-completion-openai/{MODEL}", "prompt": "Paid", "max_tokens": 8, "seed": 1}
    answer = litellm.text_completion(**SERVER, **prompt)
    chunks = litellm.text_completion(**SERVER, **prompt, stream=True)
    equal("".join(chunk.choices[0].text or "" for chunk in chunks), answer.choices[0].text, "text")
    two = litellm.text_completion(**SERVER, **prompt | {"prompt": ["Paid", "Due"]})
    equal(len(two.choices), 2, "number of choices")


@check
def responses():
    asked = {"model": f"openai/{MODEL}", "input": QUESTION, "max_output_tokens": 16, "temperature": 0}
    response = litellm.responses(**SERVER, **asked)
    events = litellm.responses(**SERVER, **asked, stream=True)
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    equal(text, response.output[0].content[0].text, "text")


@check
def batch():
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 4, "seed": 1}
    line = {"custom_id": "q0", "method": "POST", "url": "/v1/chat/completions", "body": body}
    openai = {"custom_llm_provider": "openai", "api_base": BASE_URL, "api_key": KEY}
    data = ("in.jsonl", io.BytesIO(json.dumps(line).encode()))
    file = litellm.create_file(file=data, purpose="batch", **openai)
    batch = litellm.create_batch(
        completion_window="24h", endpoint="/v1/chat/completions", input_file_id=file.id, **openai
    )
    started = time.monotonic()
    while batch.status not in ("completed", "failed"):
        assert time.monotonic() - started < 60, batch
        time.sleep(0.1)
        batch = litellm.retrieve_batch(batch_id=batch.id, **openai)
    answer = json.loads(litellm.file_content(file_id=batch.output_file_id, **openai).text)
    equal(answer["response"]["body"]["choices"][0]["message"]["content"], text(ask(max_tokens=4)), "text")


@check
def errors():
    refused(litellm.AuthenticationError, lambda: ask(api_key="tm-0"))
    refused(litellm.NotFoundError, lambda: ask(model="openai/none"))
    refused(litellm.BadRequestError, lambda: ask(temperature=9))


@check
def error_context_length():
    """LiteLLM knows the error by its text alone, by `this model's maximum context length is`."""
    long = [{"role": "user", "content": "x " * 20000}]
    refused(litellm.ContextWindowExceededError, lambda: ask(messages=long))


@check
def embedding():
    answer = litellm.embedding(**SERVER, model=f"openai/{EMBEDDING_MODEL}", input=[QUESTION, "Paid"])
    equal([one["index"] for one in answer.data], [0, 1])
    for one in answer.data:
        unit(one["embedding"])
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 2, answer.usage


@check
async def aembedding_as_of_vllm():
    answer = await litellm.aembedding(**SERVER, model=f"hosted_vllm/{EMBEDDING_MODEL}", input=["Paid"])
    unit(answer.data[0]["embedding"])


if __name__ == "__main__":
    run()
