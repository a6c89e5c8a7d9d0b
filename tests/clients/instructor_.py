"""Instructor: the package `instructor`. See `checks.py` for how to run it.

The name of the file ends with an underscore, because a script hides a package of the same name.
"""

import instructor
import openai

from checks import BASE_URL, CLOSE, KEY, MESSAGES, MODEL, STRUCTURED_TOKENS, Date, Note, check, refused, run

STRUCTURED = {"model": MODEL, "messages": MESSAGES, "max_tokens": STRUCTURED_TOKENS, "seed": 1, "max_retries": 0}


def client(mode, **changes):
    """Returns a client that asks for structured output in one of the package's ways."""
    server = {"base_url": BASE_URL, "api_key": KEY, "max_retries": 0, "timeout": 60}
    return instructor.from_openai(openai.OpenAI(**server | changes), mode=mode)


def create(mode, **changes):
    """Asks for a date."""
    return client(mode).chat.completions.create(**STRUCTURED | {"response_model": Date} | changes)


@check
def tools():
    assert isinstance(create(instructor.Mode.TOOLS), Date)


@check
def tools_strict():
    assert isinstance(create(instructor.Mode.TOOLS_STRICT), Date)


@check
def json_schema():
    assert isinstance(create(instructor.Mode.JSON_SCHEMA), Date)


@check
def json_schema_with_system_message():
    messages = [{"role": "system", "content": "Be short."}, *MESSAGES]
    assert isinstance(create(instructor.Mode.JSON_SCHEMA, messages=messages), Date)


@check
def json_object():
    """Instructor puts the schema into the prompt, and the server promises no more than an object."""
    note = create(instructor.Mode.JSON, response_model=Note, logit_bias=CLOSE)
    assert isinstance(note, Note) and note.state is None, note


@check
def completion_comes_along():
    for mode in [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA]:
        date, answer = client(mode).chat.completions.create_with_completion(**STRUCTURED, response_model=Date)
        assert isinstance(date, Date) and answer.usage.total_tokens > 0, answer


@check
def partial_objects_of_a_stream():
    for mode in [instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS]:
        parts = list(client(mode).chat.completions.create_partial(**STRUCTURED, response_model=Date))
        Date.model_validate(parts[-1].model_dump())


@check
def provider_by_name():
    server = {"base_url": BASE_URL, "api_key": KEY, "mode": instructor.Mode.JSON_SCHEMA}
    asked = {key: value for key, value in STRUCTURED.items() if key != "model"}
    date = instructor.from_provider(f"openai/{MODEL}", **server).chat.completions.create(**asked, response_model=Date)
    assert isinstance(date, Date)


@check
def responses_tools():
    asked = {"model": MODEL, "input": MESSAGES, "max_output_tokens": STRUCTURED_TOKENS, "max_retries": 0}
    assert isinstance(client(instructor.Mode.RESPONSES_TOOLS).responses.create(**asked, response_model=Date), Date)


@check
async def async_client():
    server = {"base_url": BASE_URL, "api_key": KEY, "max_retries": 0}
    async with openai.AsyncOpenAI(**server) as inner:
        outer = instructor.from_openai(inner, mode=instructor.Mode.JSON_SCHEMA)
        assert isinstance(await outer.chat.completions.create(**STRUCTURED, response_model=Date), Date)


@check
def errors():
    outer = client(instructor.Mode.JSON_SCHEMA, api_key="tm-0")
    error = refused(Exception, lambda: outer.chat.completions.create(**STRUCTURED, response_model=Date))
    assert "invalid_api_key" in str(error), error


if __name__ == "__main__":
    run()
