"""LlamaIndex: the package `llama-index-llms-openai-like`. See `checks.py` for how to run it.

The name of the file ends with an underscore, because a script hides a package of the same name.
"""

import openai
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

from checks import (
    ARGUMENTS,
    BASE_URL,
    KEY,
    MODEL,
    QUESTION,
    STRUCTURED_TOKENS,
    Clock,
    Date,
    Weather,
    check,
    equal,
    refused,
    run,
)

PROMPT = PromptTemplate(QUESTION)
TOOLS = [
    FunctionTool.from_defaults(lambda **arguments: "sunny", name="Weather", description="Weather", fn_schema=Weather),
    FunctionTool.from_defaults(lambda **arguments: "noon", name="Clock", description="Time", fn_schema=Clock),
]


def model(tokens=16, **changes):
    """Returns a model of chats with tools."""
    return OpenAILike(
        **{
            "model": MODEL,
            "api_base": BASE_URL,
            "api_key": KEY,
            "max_retries": 0,
            "max_tokens": tokens,
            "temperature": 1,
            "context_window": 8192,
            "is_chat_model": True,
            "is_function_calling_model": True,
            "additional_kwargs": {"seed": 1},
        }
        | changes
    )


def messages(*texts):
    """Returns a conversation that begins with the user."""
    roles = [MessageRole.USER, MessageRole.ASSISTANT]
    return [ChatMessage(role=roles[index % 2], content=text) for index, text in enumerate(texts)]


@check
def chat():
    answer = model().chat(messages(QUESTION))
    assert answer.message.content and answer.raw.usage.total_tokens > 0, answer
    assert answer.additional_kwargs["completion_tokens"] <= 16, answer.additional_kwargs


@check
def chat_conversation():
    system = ChatMessage(role=MessageRole.SYSTEM, content="Be short.")
    answer = model().chat([system, *messages(QUESTION, "2024-03-03", "And the year?")])
    assert answer.message.content, answer


@check
def chat_stream():
    pieces = [piece.delta or "" for piece in model().stream_chat(messages(QUESTION))]
    equal("".join(pieces), model().chat(messages(QUESTION)).message.content, "text")


@check
async def chat_async():
    answer = await model().achat(messages(QUESTION))
    stream = await model().astream_chat(messages(QUESTION))
    equal("".join([piece.delta or "" async for piece in stream]), answer.message.content, "text")


@check
def complete_by_chat():
    equal(model().complete(QUESTION).text, model().chat(messages(QUESTION)).message.content, "text")


@check
def complete_by_completions():
    texter = model(is_chat_model=False, is_function_calling_model=False)
    answer = texter.complete("Paid")
    equal("".join(piece.delta or "" for piece in texter.stream_complete("Paid")), answer.text, "text")


@check
def chat_logprobs():
    answer = model(logprobs=True, top_logprobs=2).chat(messages(QUESTION))
    equal(len(answer.logprobs[0]), 2, "number of top_logprobs")


@check
def structured_by_tools():
    assert isinstance(model(STRUCTURED_TOKENS).structured_predict(Date, PROMPT), Date)


@check
def structured_as_a_model():
    answer = model(STRUCTURED_TOKENS).as_structured_llm(Date).complete(QUESTION)
    assert isinstance(answer.raw, Date), answer


@check
def structured_in_stream():
    """By a schema: with tools, this method lets the model choose whether it calls one."""
    asker = model(STRUCTURED_TOKENS, should_use_structured_outputs=True)
    *_, last = asker.stream_structured_predict(Date, PROMPT)
    Date.model_validate(last.model_dump())


@check
def structured_by_json_schema():
    asker = model(STRUCTURED_TOKENS, should_use_structured_outputs=True)
    assert isinstance(asker.structured_predict(Date, PROMPT), Date)


@check
def tools_required():
    asker = model(STRUCTURED_TOKENS)
    answer = asker.chat_with_tools(TOOLS, user_msg=QUESTION, tool_required=True)
    calls = asker.get_tool_calls_from_response(answer)
    for call in calls:
        ARGUMENTS[call.tool_name].model_validate(call.tool_kwargs)
    assert calls, answer


@check
def tools_one_call_at_a_time():
    asker = model(STRUCTURED_TOKENS)
    answer = asker.chat_with_tools(TOOLS, user_msg=QUESTION, tool_required=True, allow_parallel_tool_calls=False)
    equal(len(asker.get_tool_calls_from_response(answer)), 1, "number of calls")


@check
def tools_auto():
    answer = model().chat_with_tools(TOOLS, user_msg=QUESTION)
    assert answer.message.role == MessageRole.ASSISTANT, answer


@check
def tools_in_stream():
    asker = model(STRUCTURED_TOKENS)
    *_, last = asker.stream_chat_with_tools(TOOLS, user_msg=QUESTION, tool_required=True)
    for call in asker.get_tool_calls_from_response(last):
        ARGUMENTS[call.tool_name].model_validate(call.tool_kwargs)


@check
def tools_whole_turn():
    asker = model(STRUCTURED_TOKENS)
    first = asker.chat_with_tools(TOOLS, user_msg=QUESTION, tool_required=True)
    results = [
        ChatMessage(role=MessageRole.TOOL, content="sunny", additional_kwargs={"tool_call_id": call.tool_id})
        for call in asker.get_tool_calls_from_response(first)
    ]
    history = [*messages(QUESTION), first.message, *results]
    second = model().chat_with_tools(TOOLS, chat_history=history)
    assert second.raw.usage.prompt_tokens > first.raw.usage.prompt_tokens, second.raw.usage


@check
def errors():
    refused(openai.AuthenticationError, lambda: model(api_key="tm-0").chat(messages(QUESTION)))
    refused(openai.NotFoundError, lambda: model(model="none").chat(messages(QUESTION)), "model")
    refused(
        openai.BadRequestError, lambda: model(temperature=2, top_logprobs=2).chat(messages(QUESTION), top_p=9), "top_p"
    )


if __name__ == "__main__":
    run()
