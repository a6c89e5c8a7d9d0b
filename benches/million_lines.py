"""A batch of a million lines, from the upload to a retry: how long each call takes, and the memory of the process.

    cargo build --release
    python3 benches/million_lines.py [--lines 1000000] [--tritmill target/release/tritmill]
    python3 benches/million_lines.py --redis redis://localhost --database postgres://tritmill@localhost/empty

Starts `tritmill standalone` with the built-in model over a new file, or over servers, uploads a file of lines with one token each, creates a batch, polls it while it
runs, reads all results by their cursor, runs 1,000 named lines again, and reads the results that are new. Prints the longest call of each kind, the
rate of the cursor, and the largest resident memory of the process. Needs no other package than Python's own, and some minutes.
"""

import argparse
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
CHAT = "/v1/chat/completions"


def line(number):
    body = {"model": "demo", "messages": [{"role": "user", "content": f"Paid on day {number}"}], "max_tokens": 1, "temperature": 0}
    return json.dumps({"custom_id": f"q{number}", "method": "POST", "url": CHAT, "body": body}).encode() + b"\n"


class Service:
    def __init__(self, program, folder, lines, redis, database):
        store = ["--redis", redis, "--database", database] if database else ["--store", os.path.join(folder, "store")]
        words = [program, "standalone", "--json", "--model", "demo", "--api", "127.0.0.1:0", "--max-batch-lines", str(lines),
                 "--first-key-file", os.path.join(folder, "key"), "--max-sequences", "256"] + store
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        ready = json.loads(self.process.stdout.readline())
        self.address, self.key = ready["api"], ready["first_key"]
        self.took = {}

    def call(self, kind, method, path, body=None, headers=None):
        """Returns the parsed answer, and notes how long the call took."""
        began = time.perf_counter()
        connection = http.client.HTTPConnection(self.address, timeout=600)
        headers = {"authorization": f"Bearer {self.key}", "content-type": "application/json"} | (headers or {})
        connection.request(method, path, body if not isinstance(body, dict) else json.dumps(body), headers)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        took = time.perf_counter() - began
        self.took.setdefault(kind, []).append(took)
        if answer.status != 200:
            sys.exit(f"{method} {path}: {answer.status} {content[:500]!r}")
        return content if answer.getheader("content-type", "").startswith("application/x-ndjson") else json.loads(content)

    def memory(self, name="VmHWM"):
        with open(f"/proc/{self.process.pid}/status") as status:
            return next(int(entry.split()[1]) for entry in status if entry.startswith(name)) / 1024


def upload(service, path):
    """Sends the file in pieces, without holding it."""
    head = (b"--x\r\ncontent-disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n--x\r\ncontent-disposition: form-data; name=\"file\"; "
            b"filename=\"million.jsonl\"\r\ncontent-type: application/octet-stream\r\n\r\n")
    tail = b"\r\n--x--\r\n"

    def pieces():
        yield head
        with open(path, "rb") as file:
            while piece := file.read(1 << 20):
                yield piece
        yield tail

    headers = {"content-type": "multipart/form-data; boundary=x", "content-length": str(len(head) + os.path.getsize(path) + len(tail))}
    return service.call("upload", "POST", "/v1/files", pieces(), headers)["id"]


def until(service, batch, state):
    """Polls a batch until it is in a state; returns it and the seconds."""
    began, said = time.perf_counter(), 0
    while True:
        now = service.call("get batch", "GET", f"/v1/batches/{batch}")
        if now["status"] == state:
            return now, time.perf_counter() - began
        if now["status"] in ("failed", "expired", "cancelled"):
            sys.exit(f"the batch is {now['status']}: {now['errors']}")
        if time.perf_counter() - said > 20:
            said = time.perf_counter()
            print(f"{now['status']}, {now['request_counts']}, {service.memory('VmRSS'):.0f} MiB", file=sys.stderr)
        service.call("list batches", "GET", "/v1/batches?limit=20")
        service.call("results, one page", "GET", f"/v1/batches/{batch}/results?limit=100")
        time.sleep(1)


def read_all(service, batch, after=""):
    """Reads all results after a cursor; returns their number, the seconds, and the last cursor."""
    count, began = 0, time.perf_counter()
    while True:
        page = service.call("results, a page of the cursor", "GET", f"/v1/batches/{batch}/results?limit=1000&after={after}")
        lines = page.splitlines()
        if not lines:
            return count, time.perf_counter() - began, after
        count += len(lines)
        after = json.loads(lines[-1])["cursor"]


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--lines", type=int, default=1_000_000)
    a.add_argument("--again", type=int, default=1000, help="lines that run again")
    a.add_argument("--tritmill", default=os.path.join(HERE, "../target/release/tritmill"))
    a.add_argument("--redis", help="URL of Redis, with --database")
    a.add_argument("--database", help="URL of a Postgres database without Tritmill's tables")
    args = a.parse_args()
    if bool(args.redis) != bool(args.database):
        a.error("--redis and --database go together")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "in.jsonl")
        with open(path, "wb") as file:
            for number in range(args.lines):
                file.write(line(number))
        service = Service(os.path.abspath(args.tritmill), folder, args.lines, args.redis, args.database)
        try:
            file = upload(service, path)
            asked = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
            service.call("estimate", "POST", "/v1/batches/estimate", asked)
            batch = service.call("create", "POST", "/v1/batches", asked)["id"]
            done, seconds = until(service, batch, "completed")
            print(f"{args.lines} lines of {os.path.getsize(path) / 1e6:.0f} MB: {done['request_counts']}, {args.lines / seconds:.0f} lines/s")
            count, seconds, cursor = read_all(service, batch)
            print(f"results by their cursor: {count} lines, {count / seconds:.0f} lines/s")
            names = [f"q{number}" for number in range(0, args.lines, max(1, args.lines // args.again))][:args.again]
            service.call("retry", "POST", f"/v1/batches/{batch}/retry", {"custom_ids": names, "force": True})
            done, seconds = until(service, batch, "completed")
            again, _, _ = read_all(service, batch, cursor)
            print(f"{len(names)} lines again: {done['request_counts']} after {seconds:.0f} s, {again} new results")
            for kind, took in service.took.items():
                print(f"{kind:32} {len(took):6} calls, median {statistics.median(took):.3f} s, the longest {max(took):.3f} s")
            print(f"largest resident memory: {service.memory():.0f} MiB")
        finally:
            service.process.terminate()
            service.process.wait()


if __name__ == "__main__":
    main()
