"""What the scripts of the Python clients share: the server they ask, the schemas they ask for, and the runner.

    python SCRIPT.py BASE_URL KEY MODEL EMBEDDING_MODEL [PART_OF_A_NAME]

prints a line for each check, `ok NAME` or `FAIL NAME: REASON`, and exits with 1 if one failed. Instead of arguments the
variables OPENAI_BASE_URL, OPENAI_API_KEY, MODEL and EMBEDDING_MODEL are read.

The model has random weights, so checks are of what a server promises for any text: shapes, counts, errors, that a
stream adds up to the whole answer, and that structured output matches its schema. All numbers and texts in schemas are
bounded, because such a model may not end an unbounded one.
"""

import asyncio
import inspect
import os
import sys
import time
import traceback
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

_ARGUMENTS = dict(enumerate(sys.argv[1:]))
BASE_URL = _ARGUMENTS.get(0) or os.environ["OPENAI_BASE_URL"]
KEY = _ARGUMENTS.get(1) or os.environ["OPENAI_API_KEY"]
MODEL = _ARGUMENTS.get(2) or os.environ["MODEL"]
EMBEDDING_MODEL = _ARGUMENTS.get(3) or os.environ["EMBEDDING_MODEL"]
ONLY = _ARGUMENTS.get(4, "")
# Some clients make clients of their own, which read these.
os.environ |= {"OPENAI_BASE_URL": BASE_URL, "OPENAI_API_KEY": KEY}
# No client may ask another server: no proxy, no telemetry, no list of prices.
for _proxy in ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"]:
    os.environ.pop(_proxy, None)

QUESTION = "Paid on the 3rd of March, 2024"
MESSAGES = [{"role": "user", "content": QUESTION}]
# Tokens that a date or a call of a tool surely fits into, white space included.
STRUCTURED_TOKENS = 300
# Makes the golden model write `}`, so that a JSON object without a schema ends: {}.
CLOSE = {"92": 100}


class Date(BaseModel):
    """A date of 2024."""

    model_config = ConfigDict(extra="forbid")
    day: Annotated[int, Field(ge=1, le=31)]
    month: Literal["March", "May"]


class Weather(BaseModel):
    """Tells the weather of a city."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Paris", "Rome"]
    days: Annotated[int, Field(ge=1, le=9)]


class Clock(BaseModel):
    """Tells the time."""

    model_config = ConfigDict(extra="forbid")
    zone: Literal["UTC", "CET"]


class Trip(BaseModel):
    """A trip: its schema has references, a list and an alternative."""

    model_config = ConfigDict(extra="forbid")
    stops: Annotated[list[Weather], Field(min_length=1, max_length=2)]
    back: Date | None


class Note(BaseModel):
    """Says whether a bill is paid, if the text says so: {} is a note, too."""

    state: Literal["paid", "due"] | None = None


def tool(model):
    """Returns a pydantic model as a tool."""
    function = {"name": model.__name__, "description": model.__doc__, "parameters": model.model_json_schema()}
    return {"type": "function", "function": function}


TOOLS = [tool(Weather), tool(Clock)]
ARGUMENTS = {"Weather": Weather, "Clock": Clock}
# One call, which surely ends. Of several calls a model with random weights may make as many as there are tokens.
REQUIRED = {"tool_choice": "required", "parallel_tool_calls": False}
# A call of this tool: exactly one, as with OpenAI.
NAMED = {"type": "function", "function": {"name": "Weather"}}


def unit(vector, dimensions=None):
    """Fails unless a vector has length 1."""
    length = sum(x * x for x in vector) ** 0.5
    assert abs(length - 1) < 1e-4 and dimensions in (None, len(vector)), (length, len(vector))


def equal(found, wanted, what="value"):
    """Fails unless both are equal."""
    assert found == wanted, f"{what} is {found!r}, not {wanted!r}"


def one_of(found, wanted, what="value"):
    """Fails unless the first is among the second."""
    assert found in wanted, f"{what} is {found!r}, not one of {wanted!r}"


def refused(kind, call, param=None, code=None):
    """Returns the error of a call; fails if it succeeds, or fails in another way."""
    try:
        answer = call()
    except kind as error:
        if param is not None:
            equal(error.param, param, "param")
        if code is not None:
            equal(error.code, code, "code")
        return error
    raise AssertionError(f"no {kind.__name__}, but {answer!r:.200}")


_checks = []


def check(function):
    """Makes a function, plain or async, a check."""
    _checks.append(function)
    return function


def _reason(error):
    """Returns an error as one line: its text, and where in the script it happened."""
    script = os.path.abspath(sys.argv[0])
    frames = [f for f in traceback.extract_tb(error.__traceback__) if os.path.abspath(f.filename) == script]
    line = f" (line {frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]}{line}"


def run():
    """Runs the checks and ends the process."""
    failed = 0
    # One loop for all: some clients keep connections, which work in their loop only.
    loop = asyncio.Runner()
    for function in _checks:
        name = function.__name__
        if ONLY not in name:
            continue
        started = time.monotonic()
        try:
            if inspect.iscoroutinefunction(function):
                loop.run(asyncio.wait_for(function(), 60))
            else:
                function()
            print(f"ok {name}", flush=True)
        except Exception as error:
            failed += 1
            print(f"FAIL {name}: {_reason(error)}", flush=True)
        took = time.monotonic() - started
        if took > 5:
            print(f"{name} took {took:.1f} s", file=sys.stderr)
    sys.exit(failed > 0)
