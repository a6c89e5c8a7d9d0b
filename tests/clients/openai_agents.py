"""OpenAI's agents: the package `openai-agents`. See `checks.py` for how to run it."""

from typing import Annotated, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import Field

from checks import BASE_URL, KEY, MODEL, QUESTION, REQUIRED, STRUCTURED_TOKENS, Date, check, equal, run

# Traces would go to OpenAI.
set_tracing_disabled(True)
KINDS = [OpenAIChatCompletionsModel, OpenAIResponsesModel]


def agent(kind, tokens=16, **changes):
    """Returns an agent, which does as its model settings say."""
    client = AsyncOpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0)
    settings = ModelSettings(**{"max_tokens": tokens, "temperature": 1} | changes.pop("settings", {}))
    model = kind(model=MODEL, openai_client=client)
    return Agent(name="dates", instructions="Answer with a date.", model=model, model_settings=settings, **changes)


@function_tool
def weather(city: Literal["Paris", "Rome"], days: Annotated[int, Field(ge=1, le=9)]) -> str:
    """Tells the weather of a city."""
    return f"sunny in {city} for {days} days"


async def runs(kind):
    """Checks a run, structured output and its stream."""
    result = await Runner.run(agent(kind), QUESTION)
    assert isinstance(result.final_output, str) and result.final_output, result
    assert result.context_wrapper.usage.total_tokens > 0, result.context_wrapper.usage

    dates = agent(kind, STRUCTURED_TOKENS, output_type=Date)
    result = await Runner.run(dates, QUESTION)
    assert isinstance(result.final_output, Date), result
    # With structured output, which ends by itself: the package takes a cut stream for a failure.
    stream = Runner.run_streamed(dates, QUESTION)
    kinds = {event.type async for event in stream.stream_events()}
    assert "raw_response_event" in kinds and isinstance(stream.final_output, Date), kinds


async def runs_with_tools(kind):
    """Checks a run in which the model has to call a tool, then answers."""
    asked = {"tools": [weather], "settings": REQUIRED}
    result = await Runner.run(agent(kind, STRUCTURED_TOKENS, tool_use_behavior="stop_on_first_tool", **asked), QUESTION)
    assert result.final_output.startswith("sunny in "), result
    # After the first call the package asks again, and then lets the model choose.
    result = await Runner.run(agent(kind, STRUCTURED_TOKENS, **asked), QUESTION, max_turns=5)
    outputs = [item.output for item in result.new_items if item.type == "tool_call_output_item"]
    assert outputs and outputs[0].startswith("sunny in "), result.new_items


@check
async def chat_completions():
    await runs(OpenAIChatCompletionsModel)


@check
async def chat_completions_with_tools():
    await runs_with_tools(OpenAIChatCompletionsModel)


@check
async def responses():
    await runs(OpenAIResponsesModel)


@check
async def responses_with_tools():
    await runs_with_tools(OpenAIResponsesModel)


@check
async def second_turn():
    for kind in KINDS:
        first = await Runner.run(agent(kind), QUESTION)
        turn = [*first.to_input_list(), {"role": "user", "content": "And the year?"}]
        second = await Runner.run(agent(kind), turn)
        equal(len(second.to_input_list()), 4, "items")


if __name__ == "__main__":
    run()
