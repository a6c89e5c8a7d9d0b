"""Tritmill, ik_llama.cpp and bitnet.cpp side by side: one shape, the same threads, in turns.

    python3 -m venv /tmp/peer && /tmp/peer/bin/pip install numpy
    cargo build --release
    /tmp/peer/bin/python benches/peers/ggml_forks/run.py --work /tmp/peer-models --ik DIR --bitnet DIR

DIR: the folder with `llama-bench` and `llama-batched-bench` of that program, a Release build for the
machine it runs on (GGML_NATIVE). Any of the three can be left out; `--tritmill ''` leaves out Tritmill.

Makes the 2B shape with random weights for each: `tritmill model synth`; a GGUF with IQ2_BN linears for
ik_llama.cpp; one with I2_S linears for bitnet.cpp, both with a Q6_K embedding that is also the head.
Every round runs each program once for prefill and once for decode, each in a separate process.

What differs:
- Decode of the peers computes all logits and does not sample; Tritmill finds the largest logit, and by default
  computes only the logits that can be the largest. With `-- --all-logits` after the other flags it computes all.
- Prefill: the peers run it once without measurement first (llama-bench's default), in one micro-batch. All
  three compute the head only for the last position.
- Decode: the peers' tool feeds only token 0, which costs the same. All sequences of a batch advance one step
  per call, after a prompt that is not measured.
- bitnet.cpp and ik_llama.cpp have one scale per matrix and per row. All sizes and the squared ReLU are equal.
- The flags in PEERS were the fastest on a Zen 5 with AVX-512.
"""

import argparse
import json
import os
import re
import resource
import statistics
import struct
import subprocess
import sys
import tempfile

import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, FFN, CONTEXT = 128256, 2560, 30, 20, 5, 6912, 4096
KV = HIDDEN // HEADS * KV_HEADS
SCALE = 0.03  # scale of all ternary weights
F32, Q6_K, I2_S, IQ2_BN = 0, 14, 36, 135  # tensor type numbers of these programs

# For each peer: the type of its linears, then flags for llama-bench and for llama-batched-bench.
PEERS = {
    "ik_llama.cpp": (IQ2_BN, ["-fa", "1", "-rtr", "1"], ["-fa", "on", "-rtr"]),
    "bitnet.cpp": (I2_S, ["-fa", "0"], []),
}


def ternary(rng, rows, cols, group):
    """Rows of random codes 0 to 2; a byte holds one code of each of four runs of group / 4 weights, lowest first."""
    codes = rng.integers(0, 3, (rows, cols // group, 4, group // 4), dtype=np.uint8)
    return (codes[:, :, 0] | codes[:, :, 1] << 2 | codes[:, :, 2] << 4 | codes[:, :, 3] << 6).reshape(rows, cols // 4)


def iq2_bn(rng, rows, cols):
    """Each row: a single-precision scale, then blocks of 64 weights in 16 bytes."""
    scale = np.full((rows, 1), SCALE, np.float32).view(np.uint8)
    return np.concatenate([scale, ternary(rng, rows, cols, 64)], -1)


def i2_s(rng, rows, cols):
    """Blocks of 128 weights in 32 bytes (the order of the runs does not matter for random codes), then 32 bytes
    with the scale of the matrix."""
    tail = np.zeros(8, np.float32)
    tail[0] = SCALE
    return np.concatenate([ternary(rng, rows, cols, 128).reshape(-1), tail.view(np.uint8)])


def q6_k(rng, rows, cols):
    """Blocks of 256 weights: 128 low and 64 high bytes, 16 int8 scales, a half-precision scale."""
    blocks = rows * cols // 256
    quants = rng.integers(0, 256, (blocks, 192), dtype=np.uint8)
    scales = rng.integers(8, 32, (blocks, 16), dtype=np.uint8)
    scale = np.full((blocks, 1), 1e-4, np.float16).view(np.uint8)
    return np.concatenate([quants, scales, scale], -1)


MAKE = {
    F32: lambda rng, rows, cols: np.ones(rows * cols, np.float32),
    Q6_K: q6_k, I2_S: i2_s, IQ2_BN: iq2_bn,
}
SIZE = {
    F32: lambda rows, cols: rows * cols * 4,
    Q6_K: lambda rows, cols: rows * cols // 256 * 210,
    I2_S: lambda rows, cols: rows * cols // 4 + 32,
    IQ2_BN: lambda rows, cols: rows * (cols // 4 + 4),
}


def write_model(path, linear):
    """Writes a GGUF file; the `gguf` package supports neither type of linears."""
    arch = "bitnet-b1.58"
    keys = {
        "general.architecture": arch, "general.name": "peer-2b", "tokenizer.ggml.model": "no_vocab",
        arch + ".vocab_size": VOCAB, arch + ".context_length": CONTEXT, arch + ".embedding_length": HIDDEN,
        arch + ".block_count": LAYERS, arch + ".feed_forward_length": FFN, arch + ".attention.head_count": HEADS,
        arch + ".attention.head_count_kv": KV_HEADS, arch + ".rope.dimension_count": HIDDEN // HEADS,
        arch + ".rope.freq_base": 500000.0, arch + ".attention.layer_norm_rms_epsilon": 1e-5,
    }
    tensors = [("token_embd", Q6_K, VOCAB, HIDDEN), ("output_norm", F32, 1, HIDDEN)]
    for i in range(LAYERS):
        tensors += [(f"blk.{i}.{name}", linear, rows, cols) for name, rows, cols in (
            ("attn_q", HIDDEN, HIDDEN), ("attn_k", KV, HIDDEN), ("attn_v", KV, HIDDEN), ("attn_output", HIDDEN, HIDDEN),
            ("ffn_gate", FFN, HIDDEN), ("ffn_up", FFN, HIDDEN), ("ffn_down", HIDDEN, FFN))]
        tensors += [(f"blk.{i}.{name}", F32, 1, cols) for name, cols in (
            ("attn_norm", HIDDEN), ("attn_sub_norm", HIDDEN), ("ffn_norm", HIDDEN), ("ffn_sub_norm", FFN))]
    string = lambda s: struct.pack("<Q", len(s)) + s.encode()
    value = lambda v: (struct.pack("<I", 8) + string(v) if isinstance(v, str) else
                       struct.pack("<If", 6, v) if isinstance(v, float) else struct.pack("<II", 4, v))
    pad = lambda n: -n % 32
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys))
    head += b"".join(string(key) + value(v) for key, v in keys.items())
    at = 0
    for name, kind, rows, cols in tensors:
        shape = [cols] if kind == F32 else [cols, rows]
        head += string(name + ".weight") + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, at)
        at += SIZE[kind](rows, cols) + pad(SIZE[kind](rows, cols))
    rng = np.random.default_rng(1)
    with open(path + ".new", "wb") as out:
        out.write(head + bytes(pad(len(head))))
        for name, kind, rows, cols in tensors:
            data = MAKE[kind](rng, rows, cols).tobytes()
            assert len(data) == SIZE[kind](rows, cols), name
            out.write(data + bytes(pad(len(data))))
    os.replace(path + ".new", path)


def run(command):
    # bitnet.cpp keeps a thread's part of a result on the stack: 7 MB for a prefill of 512 with two threads, 14 MB with one.
    stack = lambda: resource.setrlimit(resource.RLIMIT_STACK, (64 << 20, resource.getrlimit(resource.RLIMIT_STACK)[1]))
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=stack, cwd=tempfile.gettempdir(), env=os.environ | {"OMP_STACKSIZE": "64M"})
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stderr[-2000:]}\nexit status {done.returncode}")
    return done


def peer(name, folder, model, args, sizes):
    """One turn of a peer: tokens per second by (phase, batch)."""
    _, bench, batched = PEERS[name]
    rates = {}
    if args.prefill:
        out = run([f"{folder}/llama-bench", "-m", model, "-t", str(args.threads), "-p", str(args.prefill), "-n", "0",
                   "-r", "1", "-ub", str(args.prefill), "-o", "json", *bench]).stdout
        rates["prefill", 1] = json.loads(out)[0]["avg_ts"]
    done = run([f"{folder}/llama-batched-bench", "-m", model, "-t", str(args.threads), "-c",
                str(max(sizes) * (args.prompt + args.generate) + 64), "-npp", str(args.prompt), "-ntg", str(args.generate),
                "-npl", ",".join(map(str, sizes)), *batched])
    # A row of the table, on either output stream: prompt, generated, batch, cache, prefill's seconds and rate, decode's …
    for row in re.findall(r"^\|([ \d.|]+)\|$", done.stdout + "\n" + done.stderr, re.M):
        cells = row.split("|")
        rates["decode", int(cells[2])] = float(cells[7])
    return rates


def tritmill(args, model, sizes, fmt):
    def rows(*flags):
        command = [args.tritmill, "bench", "engine", "--model", model, "--format", fmt, "--threads", str(args.threads),
                   "--repetitions", "1", "--json", *flags, *args.extra]
        return {(row["phase"], row["batch"]): row["tokens_per_s"] for row in json.loads(run(command).stdout)["rows"]}

    prefill = rows("--batch", "1", "--prompt", str(args.prefill), "--generate", "2") if args.prefill else {}
    decode = rows("--batch", ",".join(map(str, sizes)), "--prompt", str(args.prompt), "--generate", str(args.generate))
    return {key: rate for key, rate in prefill.items() if key[0] == "prefill"} | {key: rate for key, rate in decode.items() if key[0] == "decode"}


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--work", required=True, help="folder for the models (0.8 GB each)")
    a.add_argument("--ik", help="folder with ik_llama.cpp's programs")
    a.add_argument("--bitnet", help="folder with bitnet.cpp's programs")
    a.add_argument("--tritmill", default=os.path.join(HERE, "../../../target/release/tritmill"))
    a.add_argument("--formats", default="i2_s", help="of Tritmill: i2_s, tl2 or both")
    a.add_argument("--threads", type=int, default=2)
    a.add_argument("--batch", default="1,4,8,16,32")
    a.add_argument("--prefill", type=int, default=512, help="tokens of the prompt that prefill is measured with; 0: it is not")
    a.add_argument("--prompt", type=int, default=64, help="tokens before decode")
    a.add_argument("--generate", type=int, default=16)
    a.add_argument("--rounds", type=int, default=3)
    a.add_argument("--json", action="store_true")
    a.add_argument("extra", nargs="*", help="after --: more flags for tritmill bench engine")
    args = a.parse_args()
    sizes = [int(n) for n in args.batch.split(",")]
    for name in ("work", "ik", "bitnet", "tritmill"):
        if getattr(args, name):  # the programs run in the work folder, because they write logs
            setattr(args, name, os.path.abspath(getattr(args, name)))
    os.makedirs(args.work, exist_ok=True)
    turns = {}  # in this order: name, then a function that returns rates by (phase, batch)
    for name, folder in (("ik_llama.cpp", args.ik), ("bitnet.cpp", args.bitnet)):
        if folder:
            model = os.path.join(args.work, f"2b-{name.split('.')[0].split('_')[0]}.gguf")
            if not os.path.exists(model):
                write_model(model, PEERS[name][0])
            turns[name] = lambda name=name, folder=folder, model=model: peer(name, folder, model, args, sizes)
    peers = list(turns)
    if args.tritmill:
        ours = os.path.join(args.work, "2b")
        if not os.path.exists(ours):
            subprocess.run([args.tritmill, "model", "synth", "--shape", "bitnet-2b", "--out", ours], check=True)
        for fmt in args.formats.split(","):
            turns["tritmill " + fmt] = lambda fmt=fmt: tritmill(args, ours, sizes, fmt)
    points = [("prefill", 1)] * (args.prefill > 0) + [("decode", n) for n in sizes]
    figures = {}
    for turn in range(args.rounds):
        for name, measure in turns.items():
            print(f"round {turn + 1} of {args.rounds}: {name}", file=sys.stderr)
            for point, rate in measure().items():
                figures.setdefault((name, *point), []).append(rate)
    median = {key: statistics.median(values) for key, values in figures.items()}
    print(f"tokens a second on {args.threads} threads, medians of {args.rounds}; prefill of {args.prefill}, decode of "
          f"{args.generate} after {args.prompt}; ratio: to the best peer")
    print(f"{'phase':8} {'batch':>5} " + " ".join(f"{name:>15} ratio" for name in turns))
    for phase, n in points:
        best = max((median[name, phase, n] for name in peers), default=float("nan"))
        rates = [median[name, phase, n] for name in turns]
        print(f"{phase:8} {n:5} " + " ".join(f"{rate:15.1f} {rate / best:5.2f}" for rate in rates))
    if args.json:
        print(json.dumps([{"program": k[0], "phase": k[1], "batch": k[2], "tokens_per_s": round(v, 2)} for k, v in median.items()]))


if __name__ == "__main__":
    main()
