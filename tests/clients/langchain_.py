"""LangChain: the package `langchain-openai`. See `checks.py` for how to run it.

The name of the file ends with an underscore, because a script hides a package of the same name.
"""

import openai
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

from checks import (
    ARGUMENTS,
    BASE_URL,
    CLOSE,
    EMBEDDING_MODEL,
    KEY,
    MODEL,
    QUESTION,
    REQUIRED,
    STRUCTURED_TOKENS,
    Clock,
    Date,
    Weather,
    check,
    equal,
    one_of,
    refused,
    run,
    unit,
)

SERVER = {"base_url": BASE_URL, "api_key": KEY, "model": MODEL, "max_retries": 0}


def chat(**changes):
    """Returns a model of chats that answers shortly."""
    return ChatOpenAI(**SERVER | {"max_tokens": 16, "seed": 1, "temperature": 1} | changes)


def structured(**changes):
    """Returns a model of chats with tokens enough for structured output."""
    return chat(max_tokens=STRUCTURED_TOKENS, **changes)


def responses(**changes):
    """Returns a model that uses responses instead of chat completions."""
    return ChatOpenAI(**SERVER | {"max_tokens": 16, "temperature": 0, "use_responses_api": True} | changes)


def valid_calls(message):
    """Returns the calls of a message, each of them with arguments that fit its tool."""
    equal(message.invalid_tool_calls, [], "invalid_tool_calls")
    assert message.tool_calls, message
    for call in message.tool_calls:
        assert call["id"], call
        ARGUMENTS[call["name"]].model_validate(call["args"])
    return message.tool_calls


@check
def invoke():
    message = chat().invoke(QUESTION)
    assert isinstance(message, AIMessage) and message.content, message
    one_of(message.response_metadata["finish_reason"], ["stop", "length"])
    usage = message.usage_metadata
    equal(usage["total_tokens"], usage["input_tokens"] + usage["output_tokens"], "total_tokens")
    assert message.response_metadata["id"].startswith("chatcmpl-"), message.response_metadata


@check
def invoke_conversation():
    turn = [SystemMessage("Be short."), HumanMessage(QUESTION), AIMessage("2024-03-03"), HumanMessage("And?")]
    assert chat().invoke(turn).usage_metadata["input_tokens"] > 20


@check
def invoke_content_of_parts():
    parts = HumanMessage([{"type": "text", "text": QUESTION}])
    equal(chat().invoke([parts]).content, chat().invoke(QUESTION).content, "text")


@check
def stream():
    chunks = list(chat().stream(QUESTION))
    equal("".join(chunk.content for chunk in chunks), chat().invoke(QUESTION).content, "text")


@check
def stream_with_usage():
    message = None
    for chunk in chat(stream_usage=True).stream(QUESTION):
        message = chunk if message is None else message + chunk
    equal(message.usage_metadata["total_tokens"], chat().invoke(QUESTION).usage_metadata["total_tokens"])
    one_of(message.response_metadata["finish_reason"], ["stop", "length"])


@check
async def ainvoke_and_astream():
    text = (await chat().ainvoke(QUESTION)).content
    equal("".join([chunk.content async for chunk in chat().astream(QUESTION)]), text, "text")


@check
def batch():
    first, second = chat().batch([QUESTION, QUESTION])
    equal(first.content, second.content, "text")


@check
def stop():
    model, text = chat(), chat().invoke(QUESTION).content
    equal(model.invoke(QUESTION, stop=[text[4:6]]).content, text[: text.index(text[4:6])], "text")


@check
def logprobs():
    message = chat(logprobs=True, top_logprobs=2).invoke(QUESTION)
    equal(len(message.response_metadata["logprobs"]["content"]), message.usage_metadata["output_tokens"])


@check
def several_choices():
    answers = chat(n=2).generate([[HumanMessage(QUESTION)]]).generations[0]
    equal(len(answers), 2, "number of choices")


@check
def structured_by_json_schema():
    model = structured().with_structured_output(Date, method="json_schema")
    assert isinstance(model.invoke(QUESTION), Date)
    assert isinstance(list(model.stream(QUESTION))[-1], Date)


@check
def structured_by_json_schema_strict():
    model = structured().with_structured_output(Date, method="json_schema", strict=True, include_raw=True)
    answer = model.invoke(QUESTION)
    assert isinstance(answer["parsed"], Date) and answer["parsing_error"] is None, answer


@check
def structured_by_function_calling():
    model = structured().with_structured_output(Date, method="function_calling")
    assert isinstance(model.invoke(QUESTION), Date)


@check
def structured_by_json_mode():
    model = chat(logit_bias=CLOSE).with_structured_output(None, method="json_mode")
    equal(model.invoke(QUESTION), {}, "object")


@check
def tools_required():
    message = structured().bind_tools([Weather, Clock], **REQUIRED).invoke(QUESTION)
    valid_calls(message)
    equal(message.response_metadata["finish_reason"], "tool_calls", "finish_reason")


@check
def tools_named():
    model = structured().bind_tools([Weather, Clock], tool_choice="Weather", strict=True)
    equal([call["name"] for call in valid_calls(model.invoke(QUESTION))], ["Weather"], "names")


@check
def tools_one_call_at_a_time():
    model = structured().bind_tools([Weather, Clock], tool_choice="any", parallel_tool_calls=False)
    equal(len(valid_calls(model.invoke(QUESTION))), 1, "number of calls")


@check
def tools_auto_and_none():
    for choice in ["auto", "none"]:
        message = chat().bind_tools([Weather, Clock], tool_choice=choice).invoke(QUESTION)
        one_of(message.response_metadata["finish_reason"], ["stop", "length", "tool_calls"], choice)


@check
def tools_in_stream():
    model = structured().bind_tools([Weather, Clock], **REQUIRED)
    message = None
    for chunk in model.stream(QUESTION):
        message = chunk if message is None else message + chunk
    told = [(call["name"], call["args"]) for call in valid_calls(message)]
    equal(told, [(call["name"], call["args"]) for call in model.invoke(QUESTION).tool_calls], "calls")


@check
def tools_whole_turn():
    first = structured().bind_tools([Weather, Clock], **REQUIRED).invoke(QUESTION)
    results = [ToolMessage("sunny", tool_call_id=call["id"]) for call in valid_calls(first)]
    second = chat().bind_tools([Weather, Clock]).invoke([HumanMessage(QUESTION), first, *results])
    assert second.usage_metadata["input_tokens"] > first.usage_metadata["input_tokens"], second


@check
def reasoning_effort():
    one_of(chat(reasoning_effort="low").invoke(QUESTION).response_metadata["finish_reason"], ["stop", "length"])


@check
def responses_invoke():
    message = responses().invoke(QUESTION)
    assert message.text and message.response_metadata["id"].startswith("resp_"), message
    assert message.usage_metadata["output_tokens"] > 0, message


@check
def responses_stream():
    chunks = list(responses().stream(QUESTION))
    equal("".join(chunk.text for chunk in chunks), responses().invoke(QUESTION).text, "text")


@check
def responses_structured():
    model = responses(max_tokens=STRUCTURED_TOKENS).with_structured_output(Date, method="json_schema")
    assert isinstance(model.invoke(QUESTION), Date)


@check
def responses_tools():
    model = responses(max_tokens=STRUCTURED_TOKENS).bind_tools([Weather, Clock], **REQUIRED)
    valid_calls(model.invoke(QUESTION))


@check
def responses_previous():
    model = responses(use_previous_response_id=True)
    first = model.invoke(QUESTION)
    second = model.invoke([HumanMessage(QUESTION), first, HumanMessage("And?")])
    assert second.usage_metadata["input_tokens"] > first.usage_metadata["input_tokens"], second


@check
def text_completion():
    model = OpenAI(**SERVER, max_tokens=8, seed=1, temperature=1)
    text = model.invoke("Paid")
    equal(model.batch(["Paid", "Due"])[0], text, "text of the first of two prompts")
    equal("".join(model.stream("Paid")), text, "text of the stream")


@check
def errors():
    refused(openai.AuthenticationError, lambda: chat(api_key="tm-0").invoke(QUESTION))
    refused(openai.NotFoundError, lambda: chat(model="none").invoke(QUESTION), "model")
    refused(openai.BadRequestError, lambda: chat(temperature=9).invoke(QUESTION), "temperature")
    refused(ContextOverflowError, lambda: chat().invoke("x " * 20000))


@check
def embeddings():
    # LangChain cuts texts into tokens of OpenAI's models, unless it is told not to.
    own = {"model": EMBEDDING_MODEL, "check_embedding_ctx_length": False}
    model = OpenAIEmbeddings(**SERVER | own)
    vectors = model.embed_documents([QUESTION, "Paid"])
    for vector in vectors:
        unit(vector)
    equal(model.embed_query("Paid"), vectors[1])


@check
async def embeddings_async():
    own = {"model": EMBEDDING_MODEL, "check_embedding_ctx_length": False}
    unit(await OpenAIEmbeddings(**SERVER | own).aembed_query(QUESTION))


if __name__ == "__main__":
    run()
