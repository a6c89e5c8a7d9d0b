"""Sends requests to a full queue with the openai package; fails unless a response has Retry-After."""

import time

import openai

client = openai.OpenAI(max_retries=0)
started = time.monotonic()
while True:
    try:
        # A new limit takes effect within seconds; until then a request is queued and times out.
        client.with_options(timeout=1).completions.create(model="demo", prompt="Paid")
    except openai.RateLimitError as error:
        assert error.code == "queue_full", error
        assert int(error.response.headers["retry-after"]) >= 1, error.response.headers
        break
    except openai.APITimeoutError:
        assert time.monotonic() - started < 60
print("told when")
