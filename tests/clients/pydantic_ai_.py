"""Pydantic AI: the package `pydantic-ai-slim[openai]`. See `checks.py` for how to run it.

The name of the file ends with an underscore, because a script hides a package of the same name.
"""

from typing import Annotated, Literal

from openai import AsyncOpenAI
from pydantic import Field
from pydantic_ai import Agent, ModelHTTPError, NativeOutput, PromptedOutput, ToolOutput, UsageLimits
from pydantic_ai.messages import ToolCallPart, ToolReturnPart
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from checks import (
    BASE_URL,
    CLOSE,
    KEY,
    MODEL,
    QUESTION,
    STRUCTURED_TOKENS,
    Clock,
    Date,
    Note,
    check,
    equal,
    run,
)

SHORT = {"max_tokens": 16, "seed": 1}
STRUCTURED = {"max_tokens": STRUCTURED_TOKENS, "seed": 1, "parallel_tool_calls": False}


def agent(kind=OpenAIChatModel, name=MODEL, key=KEY, **changes):
    """Returns an agent."""
    client = AsyncOpenAI(base_url=BASE_URL, api_key=key, max_retries=0)
    return Agent(kind(name, provider=OpenAIProvider(openai_client=client)), **changes)


def responder(**changes):
    """Returns an agent that uses responses instead of chat completions."""
    return agent(kind=OpenAIResponsesModel, **changes)


def weather(city: Literal["Paris", "Rome"], days: Annotated[int, Field(ge=1, le=9)]) -> str:
    """Tells the weather of a city."""
    return f"sunny in {city} for {days} days"


@check
async def text():
    result = await agent().run(QUESTION, model_settings=SHORT)
    assert isinstance(result.output, str) and result.output, result
    assert result.usage.input_tokens > 0 and 0 < result.usage.output_tokens <= 16, result.usage


@check
async def text_with_instructions():
    result = await agent(instructions="Be short.", system_prompt="Answer with a date.").run(
        QUESTION, model_settings=SHORT
    )
    assert result.output, result


@check
async def text_in_stream():
    async with agent().run_stream(QUESTION, model_settings=SHORT) as result:
        pieces = [piece async for piece in result.stream_text(delta=True, debounce_by=None)]
    whole = await agent().run(QUESTION, model_settings=SHORT)
    equal("".join(pieces), whole.output, "text")
    equal(result.usage.output_tokens, whole.usage.output_tokens, "output_tokens")


@check
async def text_of_a_second_turn():
    first = await agent().run(QUESTION, model_settings=SHORT)
    second = await agent().run("And the year?", message_history=first.all_messages(), model_settings=SHORT)
    assert second.usage.input_tokens > first.usage.input_tokens, second.usage


@check
async def output_by_tool():
    result = await agent(output_type=ToolOutput(Date)).run(QUESTION, model_settings=STRUCTURED)
    assert isinstance(result.output, Date), result


@check
async def output_by_one_of_two_tools():
    result = await agent(output_type=[Date, Clock]).run(QUESTION, model_settings=STRUCTURED)
    assert isinstance(result.output, (Date, Clock)), result


@check
async def output_by_json_schema():
    result = await agent(output_type=NativeOutput(Date)).run(QUESTION, model_settings=STRUCTURED)
    assert isinstance(result.output, Date), result


@check
async def output_by_json_schema_in_stream():
    async with agent(output_type=NativeOutput(Date)).run_stream(QUESTION, model_settings=STRUCTURED) as result:
        assert isinstance(await result.get_output(), Date)


@check
async def output_by_tool_in_stream():
    async with agent(output_type=ToolOutput(Date)).run_stream(QUESTION, model_settings=STRUCTURED) as result:
        assert isinstance(await result.get_output(), Date)


@check
async def output_by_prompt():
    closing = STRUCTURED | {"logit_bias": CLOSE}
    result = await agent(output_type=PromptedOutput(Note)).run(QUESTION, model_settings=closing)
    equal(result.output, Note(), "object")


@check
async def tool_loop():
    """The model calls the tool or ends the run, as its seed says; with some seed it does one after the other."""
    asker = agent(output_type=Date, tools=[weather], retries=3)
    for seed in range(20):
        settings = STRUCTURED | {"seed": seed, "temperature": 1.5}
        result = await asker.run(QUESTION, model_settings=settings, usage_limits=UsageLimits(request_limit=40))
        assert isinstance(result.output, Date), result
        parts = [part for message in result.all_messages() for part in message.parts]
        calls = [part.tool_call_id for part in parts if isinstance(part, ToolCallPart)]
        equal(len(set(calls)), len(calls), "number of different ids")
        if any(isinstance(part, ToolReturnPart) and part.tool_name == "weather" for part in parts):
            return
    raise AssertionError("the tool was called with no seed")


@check
async def tool_choice_auto():
    result = await agent(tools=[weather]).run(
        QUESTION, model_settings=SHORT, usage_limits=UsageLimits(request_limit=10)
    )
    assert isinstance(result.output, str), result


@check
async def thinking_effort():
    settings = SHORT | {"openai_reasoning_effort": "low"}
    assert (await agent().run(QUESTION, model_settings=settings)).output


@check
async def logprobs():
    settings = SHORT | {"openai_logprobs": True, "openai_top_logprobs": 2}
    result = await agent().run(QUESTION, model_settings=settings)
    details = result.all_messages()[-1].provider_details
    equal(len(details["logprobs"]), result.usage.output_tokens, "number of tokens")


@check
async def responses_text():
    result = await responder().run(QUESTION, model_settings={"max_tokens": 16})
    assert result.output and result.usage.output_tokens > 0, result


@check
async def responses_text_in_stream():
    async with responder().run_stream(QUESTION, model_settings={"max_tokens": 16}) as result:
        pieces = [piece async for piece in result.stream_text(delta=True, debounce_by=None)]
    assert "".join(pieces), pieces


@check
async def responses_output():
    settings = {"max_tokens": STRUCTURED_TOKENS, "parallel_tool_calls": False}
    for output in [NativeOutput(Date), ToolOutput(Date)]:
        result = await responder(output_type=output).run(QUESTION, model_settings=settings)
        assert isinstance(result.output, Date), result


@check
async def errors():
    for changes, status in [({"key": "tm-0"}, 401), ({"name": "none"}, 404)]:
        try:
            await agent(**changes).run(QUESTION, model_settings=SHORT)
        except ModelHTTPError as error:
            equal(error.status_code, status, "status")
        else:
            raise AssertionError(f"no status {status}")


if __name__ == "__main__":
    run()
