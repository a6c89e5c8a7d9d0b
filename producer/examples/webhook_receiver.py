"""Receives the webhook that announces the end of a batch, and verifies its signature (Standard Webhooks).

    export WEBHOOK_SECRET=whsec_…        # the secret that the batch was created with, or that its creation returned
    python producer/examples/webhook_receiver.py [PORT]

Needs the Python standard library only. Prints one line per verified call. A receiver must expect the same
webhook-id more than once, since delivery is at least once; this one prints the first and accepts the others.
"""

import base64
import hashlib
import hmac
import http.server
import json
import os
import sys
import time

SECRET = base64.b64decode(os.environ["WEBHOOK_SECRET"].removeprefix("whsec_"))
TOLERANCE_SECONDS = 300
BODY_BYTES_MAX = 1 << 20


def is_signed(headers, body):
    """Whether the call was signed with our secret within the last five minutes."""
    identifier, timestamp = headers.get("webhook-id", ""), headers.get("webhook-timestamp", "")
    if not timestamp.isdigit() or abs(time.time() - int(timestamp)) > TOLERANCE_SECONDS:
        return False
    signed = f"{identifier}.{timestamp}.".encode() + body
    expected = "v1," + base64.b64encode(hmac.new(SECRET, signed, hashlib.sha256).digest()).decode()
    return any(hmac.compare_digest(expected, given) for given in headers.get("webhook-signature", "").split())


class Receiver(http.server.BaseHTTPRequestHandler):
    seen = set()

    def do_POST(self):
        length = int(self.headers.get("content-length", "0"))
        if length > BODY_BYTES_MAX:
            return self.answer(413)
        body = self.rfile.read(length)
        if not is_signed(self.headers, body):
            return self.answer(401)
        self.answer(204)
        identifier = self.headers["webhook-id"]
        if identifier not in self.seen:
            self.seen.add(identifier)
            event = json.loads(body)
            print(f"{event['type']} {event['data']['id']}", flush=True)

    def answer(self, status):
        self.send_response(status)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_):
        """Keeps the output to the events."""


if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 9000
    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Receiver)
    print(f"listening on {server.server_address[1]}", flush=True)
    server.serve_forever()
