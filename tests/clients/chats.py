"""Short chats by the `openai` package, for the scripts that check it."""

import openai

from checks import BASE_URL, KEY, MESSAGES, MODEL

client = openai.OpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0, timeout=60)
SHORT = {"model": MODEL, "messages": MESSAGES, "max_tokens": 16, "seed": 1}


def ask(**changes):
    """Asks for a short answer."""
    return client.chat.completions.create(**SHORT | changes)


def text(answer):
    """Returns the text of the first choice."""
    return answer.choices[0].message.content


def joined(chunks, choice=0):
    """Returns the text that a stream adds up to."""
    choices = [c for chunk in chunks for c in chunk.choices if c.index == choice]
    return "".join(c.delta.content or "" for c in choices)
