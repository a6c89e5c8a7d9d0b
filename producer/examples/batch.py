"""Answers a file of prompts through the Batch API, with the openai package from PyPI.

    pip install openai
    export OPENAI_BASE_URL=http://127.0.0.1:8080/v1 OPENAI_API_KEY=tm-…
    python producer/examples/batch.py prompts.txt answers.jsonl [--webhook http://HOST:PORT/ --secret whsec_…]

PROMPTS has one prompt per line. The script uploads one batch line per prompt, waits for the batch, and writes one
JSON object per line: {"custom_id", "answer"} or {"custom_id", "error"}. An Idempotency-Key made from the input
lets you run it again after a crash: the same batch is found, not created twice.
"""

import argparse
import hashlib
import io
import json
import time

import openai


def batch_lines(prompts, model):
    """One OpenAI batch line per prompt."""
    for number, prompt in enumerate(prompts, start=1):
        body = {"model": model, "temperature": 0, "messages": [{"role": "user", "content": prompt}]}
        yield {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}


def create(client, lines, webhook):
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    key = hashlib.sha256(data).hexdigest()
    file = client.files.create(file=("lines.jsonl", io.BytesIO(data)), purpose="batch")
    return client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        extra_headers={"Idempotency-Key": key},
        extra_body={"webhook": webhook} if webhook else {},
    )


def wait(client, batch, seconds=1.0):
    while batch.status not in ("completed", "failed", "cancelled", "expired"):
        time.sleep(seconds)
        batch = client.batches.retrieve(batch.id)
        counts = batch.request_counts
        print(f"{batch.status}: {counts.completed} of {counts.total} answered, {counts.failed} failed", flush=True)
    return batch


def results(client, batch):
    """Results of both files of a batch, by custom_id."""
    for file in filter(None, (batch.output_file_id, batch.error_file_id)):
        for line in client.files.content(file).text.splitlines():
            line = json.loads(line)
            if line.get("error"):
                yield {"custom_id": line["custom_id"], "error": line["error"]["message"]}
            elif line["response"]["status_code"] != 200:
                yield {"custom_id": line["custom_id"], "error": line["response"]["body"]["error"]["message"]}
            else:
                answer = line["response"]["body"]["choices"][0]["message"]["content"]
                yield {"custom_id": line["custom_id"], "answer": answer}


def main():
    parser = argparse.ArgumentParser(description="Answers a file of prompts through the Batch API.")
    parser.add_argument("prompts", help="file with one prompt per line")
    parser.add_argument("answers", help="file to write")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--webhook", help="URL to call when the batch ends")
    parser.add_argument("--secret", help="the webhook's signing secret, whsec_…")
    arguments = parser.parse_args()
    with open(arguments.prompts, encoding="utf-8") as file:
        prompts = [line.rstrip("\n") for line in file if line.strip()]
    webhook = {"url": arguments.webhook} if arguments.webhook else None
    if webhook and arguments.secret:
        webhook["secret"] = arguments.secret
    client = openai.OpenAI()
    batch = wait(client, create(client, batch_lines(prompts, arguments.model), webhook))
    if batch.status == "failed":
        raise SystemExit("\n".join(f"line {error.line}: {error.message}" for error in batch.errors.data))
    with open(arguments.answers, "w", encoding="utf-8") as file:
        for result in sorted(results(client, batch), key=lambda result: int(result["custom_id"].split("-")[1])):
            file.write(json.dumps(result, ensure_ascii=False) + "\n")
    print(f"{batch.id}: {batch.status}")


if __name__ == "__main__":
    main()
