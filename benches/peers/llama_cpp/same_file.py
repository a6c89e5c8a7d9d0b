"""Tritmill and llama.cpp on one GGUF file, with the same threads, in turns.

    python3 -m venv /tmp/peer && /tmp/peer/bin/pip install xllamacpp        (the newest llama.cpp, built)
    cargo build --release
    target/release/tritmill model synth --shape maple-20b-a1b -o /tmp/maple.gguf
    /tmp/peer/bin/python benches/peers/llama_cpp/same_file.py --model /tmp/maple.gguf

With `--bin DIR`, the peer is another build of llama.cpp: DIR has its `llama-bench` and `llama-batched-bench`. So PrismML's fork, which
alone computes Ternary Bonsai 2 with its rotated basis (types PQ2_0 and PTQ1_0), can be measured by those who have it:

    git clone https://github.com/PrismML-Eng/llama.cpp /tmp/prism
    cmake -S /tmp/prism -B /tmp/prism/build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_CURL=OFF
    cmake --build /tmp/prism/build -j --target llama-bench llama-batched-bench
    target/release/tritmill model synth --shape bonsai2-9b -o /tmp/bonsai2-9b.gguf
    python3 benches/peers/llama_cpp/same_file.py --model /tmp/bonsai2-9b.gguf --bin /tmp/prism/build/bin

Both load types that llama.cpp has: TQ1_0, TQ2_0, Q2_0 (`tritmill model convert --to gguf-q2_0`). Sampling is greedy.
llama.cpp's rates are those of its server's timings; of several sequences, the tokens of all over the time of the slowest. With `--bin`, they are
those of its tools: decodes feed one token, and nothing is sampled.
"""

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import threading

HERE = os.path.dirname(os.path.abspath(__file__))


class Llama:
    """A server of llama.cpp in this process."""

    def __init__(self, args, sequences):
        import xllamacpp

        p = xllamacpp.CommonParams()
        p.model.path = args.model
        p.n_parallel = sequences
        p.n_ctx = sequences * (max(args.prompt, args.short) + args.generate + 32)
        p.n_batch, p.n_ubatch = 2048, 512
        p.cpuparams.n_threads = p.cpuparams_batch.n_threads = args.threads
        p.warmup = False
        self.server = xllamacpp.Server(p)

    def answer(self, prompt, generate):
        ids = [random.randrange(256) for _ in range(prompt)]
        out = self.server.handle_completions({
            "prompt": ids, "n_predict": generate, "temperature": 0, "cache_prompt": False, "ignore_eos": True,
        })
        return (json.loads(out) if isinstance(out, (str, bytes)) else out)["timings"]

    def prefill(self, prompt):
        return self.answer(prompt, 1)["prompt_per_second"]

    def decode(self, size, prompt, generate):
        found = []
        run = lambda: found.append(self.answer(prompt, generate))
        threads = [threading.Thread(target=run) for _ in range(size)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        return size * generate / max(timing["predicted_ms"] for timing in found) * 1000


class Tools:
    """The tools of a build of llama.cpp, a process for each measurement."""

    def __init__(self, args):
        self.folder, self.common = args.bin, ["-m", args.model, "-t", str(args.threads)]

    def run(self, tool, *flags):
        done = subprocess.run([os.path.join(self.folder, tool), *self.common, *flags], capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"{tool} failed:\n{done.stderr[-2000:]}")
        return done

    def prefill(self, prompt):
        out = self.run("llama-bench", "-p", str(prompt), "-n", "0", "-r", "1", "-o", "json").stdout
        return json.loads(out)[0]["avg_ts"]

    def decode(self, size, prompt, generate):
        context = str(size * (prompt + generate) + 64)
        done = self.run("llama-batched-bench", "-c", context, "-npp", str(prompt), "-ntg", str(generate), "-npl", str(size))
        # A row of the table, on either output stream: prompt, generated, batch, cache, prefill's seconds and rate, decode's …
        row = re.search(r"^\|([ \d.|]+)\|$", done.stdout + "\n" + done.stderr, re.M)
        return float(row[1].split("|")[7])


def tritmill(args, prompt, sizes, generate):
    command = [args.tritmill, "bench", "engine", "--model", args.model, "--threads", str(args.threads), "--batch",
               ",".join(map(str, sizes)), "--prompt", str(prompt), "--generate", str(generate), "--repetitions", "1",
               "--json", *args.extra]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {(row["phase"], row["batch"]): row["tokens_per_s"] for row in json.loads(out)["rows"]}


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--model", required=True)
    a.add_argument("--tritmill", default=os.path.join(HERE, "../../../target/release/tritmill"))
    a.add_argument("--bin", help="folder of another build's llama-bench and llama-batched-bench")
    a.add_argument("--threads", type=int, default=2)
    a.add_argument("--batch", default="1,8,32")
    a.add_argument("--prompt", type=int, default=512, help="tokens of the measured prefill")
    a.add_argument("--short", type=int, default=16, help="tokens before measured decodes")
    a.add_argument("--generate", type=int, default=32)
    a.add_argument("--rounds", type=int, default=3)
    a.add_argument("extra", nargs="*", help="after --: more flags for tritmill bench engine")
    args = a.parse_args()
    sizes = [int(n) for n in args.batch.split(",")]
    peer = Tools(args) if args.bin else Llama(args, max(sizes))
    figures = {}
    for turn in range(args.rounds):
        print(f"round {turn + 1} of {args.rounds}", file=sys.stderr)
        add = lambda of, key, rate: figures.setdefault((of, key), []).append(rate)
        add("llama.cpp", ("prefill", 1), peer.prefill(args.prompt))
        for size in sizes:
            add("llama.cpp", ("decode", size), peer.decode(size, args.short, args.generate))
        add("tritmill", ("prefill", 1), tritmill(args, args.prompt, [1], 1)["prefill", 1])
        for key, rate in tritmill(args, args.short, sizes, args.generate).items():
            if key[0] == "decode":
                add("tritmill", key, rate)
    print(f"{os.path.basename(args.model)}, {args.threads} threads, prefill {args.prompt}, medians of {args.rounds} {args.extra}")
    print(f"{'phase':8} {'batch':>5} {'llama.cpp':>10} {'tritmill':>9} ratio")
    for key in [("prefill", 1)] + [("decode", size) for size in sizes]:
        theirs, ours = (statistics.median(figures[of, key]) for of in ("llama.cpp", "tritmill"))
        print(f"{key[0]:8} {key[1]:5} {theirs:10.2f} {ours:9.2f} {ours / theirs:5.2f}")


if __name__ == "__main__":
    main()
