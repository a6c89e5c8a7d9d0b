"""Tritmill's queue, BullMQ, Celery, RQ and apalis-redis: the same no-op jobs through the same Redis.

    cargo build --release --workspace --bins
    python3 benches/peers/queues/run.py --work /tmp/queue-peers

Installs the peers into the work folder (npm, PyPI, crates.io), starts a redis-server for each run
(append-only file, synced every second, no eviction) and prints medians and ratios. Every job carries a line of
text and returns a few words, which each queue keeps with its default settings. Each peer gets the batching its
documentation recommends: BullMQ `addBulk` and concurrent jobs, Celery `group` with a prefetch, RQ `enqueue_many` and
workers that do not fork, apalis `push_bulk`, a batch size and one task per job; two worker processes for
Celery and RQ, one for BullMQ and apalis, so that Redis has the other core.

Submit is measured from the first call to the last answer, without the start of the runtime. Consume is measured
from the first observed finished job to the last. Slow peers get fewer jobs, as printed; rates do not depend on the
number. Tritmill's figures are those of `tritmill bench queue --renewals 0`, because a peer's job that takes no time has
no such step either; its workers renew only jobs that run for seconds.
"""

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.join(HERE, "../../..")


def tell(text):
    print(text, file=sys.stderr, flush=True)


class Redis:
    """A redis-server that saves its append-only file every second and does not evict."""

    def __enter__(self):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.folder = tempfile.mkdtemp(prefix="queue-peers-")
        self.process = subprocess.Popen(
            ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--dir", self.folder, "--save", "",
             "--appendonly", "yes", "--appendfsync", "everysec", "--maxmemory-policy", "noeviction"],
            stdout=subprocess.DEVNULL)
        self.url = f"redis://127.0.0.1:{self.port}"
        for _ in range(100):
            if self.ask("PING") == "PONG":
                return self
            time.sleep(0.05)
        sys.exit("redis-server did not start")

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def ask(self, *words):
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5) as s:
                s.sendall(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(w), w.encode()) for w in words))
                return s.makefile().readline().strip().lstrip("+:")
        except OSError:
            return None


class Peer:
    def __init__(self, name, jobs, submit, work, done, workers=1):
        self.name, self.jobs, self.submit, self.work, self.done, self.workers = name, jobs, submit, work, done, workers

    def run(self):
        with Redis() as redis:
            words = {"url": redis.url, "jobs": str(self.jobs)}
            fill = lambda command: [word.format(**words) for word in command]
            out = output(fill(self.submit), cwd=HERE)
            submit = self.jobs / json.loads(out.strip().splitlines()[-1])["seconds"]
            done = lambda: int(redis.ask(*self.done) or 0) if self.done[0] != "DBSIZE" else redis_size(redis)
            workers = [subprocess.Popen(fill(self.work), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=HERE)
                       for _ in range(self.workers)]
            try:
                return submit, self.watch(done)
            finally:
                for worker in workers:
                    worker.terminate()
                for worker in workers:
                    try:
                        worker.wait(10)
                    except subprocess.TimeoutExpired:
                        worker.kill()

    def watch(self, done):
        """Jobs per second from the first observed finished job to the last."""
        first, limit = None, time.monotonic() + 300
        while time.monotonic() < limit:
            now, count = time.monotonic(), done()
            if count and not first:
                first = (now, count)
            if first and count >= self.jobs:
                return (count - first[1]) / max(now - first[0], 1e-9)
            time.sleep(0.01)
        sys.exit(f"{self.name}: {done()} of {self.jobs} jobs were done in five minutes")


def redis_size(redis):
    """Number of keys in database 1, which holds Celery's results."""
    with socket.create_connection(("127.0.0.1", redis.port), timeout=5) as s:
        s.sendall(b"SELECT 1\r\nDBSIZE\r\n")
        lines = s.makefile()
        lines.readline()
        return int(lines.readline().strip().lstrip(":"))


def install(work, wanted):
    """Installs what is missing; returns the runtime of each peer."""
    os.makedirs(work, exist_ok=True)
    node, venv, target = (os.path.join(work, name) for name in ("node", "venv", "apalis"))
    if not os.path.isdir(os.path.join(node, "node_modules/bullmq")):
        tell("installing BullMQ")
        os.makedirs(node, exist_ok=True)
        subprocess.run(["npm", "install", "--silent", "--prefix", node, "bullmq", "ioredis"], check=True,
                       stdout=sys.stderr)
    python = os.path.join(venv, "bin/python")
    if not os.path.exists(os.path.join(venv, "bin/rq")):
        tell("installing Celery and RQ")
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "celery[redis]", "rq"], check=True, stdout=sys.stderr)
    if "apalis-redis" in wanted:
        tell("building the apalis program")
        manifest = os.path.join(HERE, "apalis/Cargo.toml")
        subprocess.run(["cargo", "build", "--release", "--quiet", "--manifest-path", manifest, "--target-dir", target],
                       check=True, stdout=sys.stderr)
    return node, venv, os.path.join(target, "release/apalis-peer")


def versions(node, venv):
    with open(os.path.join(node, "node_modules/bullmq/package.json"), encoding="utf8") as f:
        found = {"bullmq": json.load(f)["version"]}
    ask = "import celery, rq; print(celery.__version__, rq.__version__)"
    found["celery"], found["rq"] = output([os.path.join(venv, "bin/python"), "-c", ask]).split()
    with open(os.path.join(HERE, "apalis/Cargo.lock"), encoding="utf8") as f:
        lines = f.read().splitlines()
    found["apalis-redis"] = lines[lines.index('name = "apalis-redis"') + 1].split('"')[1]
    return found


def tritmill(args):
    """Submit and consume rates of one run; `xtask` starts the servers."""
    words = ["bench", "queue", "--json", "--jobs", str(args.jobs), "--repetitions", "1", "--starts", "1",
             "--micro-batch", str(args.micro_batch), "--consumers", str(args.consumers),
             "--renewals", str(args.renewals)]
    out = output([args.xtask, *words], cwd=ROOT)
    rows = {row["phase"]: row["jobs_per_s"] for row in json.loads(out.strip().splitlines()[-1])["rows"]}
    return rows["submit"], rows["consume"]


def output(command, **options):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, **options).stdout


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--work", required=True, help="folder for what is installed")
    a.add_argument("--xtask", default=os.path.join(ROOT, "target/debug/xtask"), help="the built xtask")
    a.add_argument("--jobs", type=int, default=20000)
    a.add_argument("--micro-batch", type=int, default=64, help="of tritmill's consumers")
    a.add_argument("--consumers", type=int, default=4, help="of tritmill")
    a.add_argument("--renewals", type=int, default=0, help="of each of tritmill's jobs")
    a.add_argument("--rounds", type=int, default=3)
    a.add_argument("--peers", default="BullMQ,Celery,RQ,apalis-redis", help="which of them")
    a.add_argument("--json", action="store_true")
    args = a.parse_args()
    wanted = args.peers.split(",")
    node, venv, apalis = install(args.work, wanted)
    os.environ["PEER_NODE_MODULES"] = os.path.join(node, "node_modules")
    bin_ = lambda name: os.path.join(venv, "bin", name)
    some = lambda share: max(args.jobs // share, 100)
    peers = [
        Peer("BullMQ", args.jobs, ["node", "bullmq_peer.cjs", "submit", "{url}", "{jobs}"],
             ["node", "bullmq_peer.cjs", "work", "{url}", "{jobs}"], ("ZCARD", "bull:peer:completed")),
        Peer("Celery", some(4), [bin_("python"), "celery_peer.py", "{url}", "{jobs}"],
             ["env", "PEER_REDIS={url}", bin_("celery"), "-A", "celery_peer", "worker", "-c", "2",
              "--prefetch-multiplier", "64", "--without-gossip", "--without-mingle", "--without-heartbeat"],
             ("DBSIZE",)),
        Peer("RQ", some(10), [bin_("python"), "rq_peer.py", "{url}", "{jobs}"],
             [bin_("rq"), "worker", "--url", "{url}", "--worker-class", "rq.worker.SimpleWorker", "--quiet", "peer"],
             ("ZCARD", "rq:finished:peer"), workers=2),
        # With about ten thousand queued jobs its script fails ("too many results to unpack").
        Peer("apalis-redis", some(4), [apalis, "submit", "{url}", "{jobs}"], [apalis, "work", "{url}", "{jobs}"],
             ("SCARD", "peer:done")),
    ]
    peers = [peer for peer in peers if peer.name in wanted]
    ours = "Tritmill"
    rates = {name: [] for name in [ours, *(peer.name for peer in peers)]}
    for number in range(args.rounds):
        tell(f"round {number + 1}: {ours}")
        rates[ours].append(tritmill(args))
        for peer in peers:
            tell(f"round {number + 1}: {peer.name}, {peer.jobs} jobs")
            rates[peer.name].append(peer.run())
    medians = {name: [statistics.median(run[i] for run in runs) for i in (0, 1)] for name, runs in rates.items()}
    if args.json:
        print(json.dumps({"jobs": args.jobs, "rounds": args.rounds, "load": os.getloadavg(), "runs": rates,
                          "medians": medians, "versions": versions(node, venv)}))
        return
    print(f"versions {versions(node, venv)}, load now {os.getloadavg()}")
    print(f"                      submit/s   consume/s   {ours} is")
    for name, (submit, consume) in medians.items():
        ratios = f"{medians[ours][0] / submit:>7.1f}x {medians[ours][1] / consume:>6.1f}x"
        print(f"{name:<20} {submit:>9.0f} {consume:>11.0f}   {ratios}")


if __name__ == "__main__":
    main()
