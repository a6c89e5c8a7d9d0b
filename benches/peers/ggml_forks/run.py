"""Tritmill, ik_llama.cpp and bitnet.cpp side by side: one shape, the same threads, in turns.

    python3 -m venv /tmp/peer && /tmp/peer/bin/pip install numpy
    cargo build --release
    /tmp/peer/bin/python benches/peers/ggml_forks/run.py --work /tmp/peer-models --ik DIR --bitnet DIR
    /tmp/peer/bin/python benches/peers/ggml_forks/run.py --work /tmp/peer-models --ik DIR --shape bonsai-1.7b

DIR: the folder with `llama-bench` and `llama-batched-bench` of that program, a Release build for the
machine it runs on (GGML_NATIVE). Any of the three can be left out; `--tritmill ''` leaves out Tritmill.

Makes the 2B shape with random weights for each: `tritmill model synth`; a GGUF with IQ2_BN linears for
ik_llama.cpp; one with I2_S linears for bitnet.cpp, both with a Q6_K embedding that is also the head. With
`--shape bonsai-1.7b` it makes that one (Qwen3) for Tritmill, which runs it with activations of two digits and of one,
and for ik_llama.cpp; bitnet.cpp has no Qwen3.
Every round runs each program once for prefill and once for decode, each in a separate process.

What differs:
- Decode of the peers computes all logits and does not sample; Tritmill finds the largest logit, and by default
  computes only the logits that can be the largest. With `-- --all-logits` after the other flags it computes all.
- Prefill: the peers run it once without measurement first (llama-bench's default), in one micro-batch. All
  three compute the head only for the last position.
- Decode: the peers' tool feeds only token 0, which costs the same. All sequences of a batch advance one step
  per call, after a prompt that is not measured.
- bitnet.cpp and ik_llama.cpp have one scale per matrix and per row; Bonsai in Tritmill has one for each 128 weights of
  a row. ik_llama.cpp multiplies one digit (int8). All sizes and the activation functions are equal.
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
SCALE = 0.03  # scale of all ternary weights
F32, Q6_K, I2_S, IQ2_BN = 0, 14, 36, 135  # tensor type numbers of these programs

# Sizes as in `tritmill model synth`.
SHAPES = {
    "bitnet-2b": dict(arch="bitnet-b1.58", vocab=128256, hidden=2560, layers=30, heads=20, kv_heads=5, head_dim=128, ffn=6912, context=4096, theta=500000.0),
    "bonsai-1.7b": dict(arch="qwen3", vocab=151936, hidden=2048, layers=28, heads=16, kv_heads=8, head_dim=128, ffn=6144, context=32768, theta=1000000.0),
}

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


def write_model(path, linear, arch, vocab, hidden, layers, heads, kv_heads, head_dim, ffn, context, theta):
    """Writes a GGUF file; the `gguf` package supports neither type of linears."""
    keys = {
        "general.architecture": arch, "general.name": "peer", "tokenizer.ggml.model": "no_vocab",
        arch + ".vocab_size": vocab, arch + ".context_length": context, arch + ".embedding_length": hidden,
        arch + ".block_count": layers, arch + ".feed_forward_length": ffn, arch + ".attention.head_count": heads,
        arch + ".attention.head_count_kv": kv_heads, arch + ".attention.key_length": head_dim, arch + ".attention.value_length": head_dim,
        arch + ".rope.dimension_count": head_dim, arch + ".rope.freq_base": theta, arch + ".attention.layer_norm_rms_epsilon": 1e-5,
    }
    queries, keys_of_heads = heads * head_dim, kv_heads * head_dim
    norms = {"bitnet-b1.58": (("attn_sub_norm", queries), ("ffn_sub_norm", ffn)), "qwen3": (("attn_q_norm", head_dim), ("attn_k_norm", head_dim))}
    tensors = [("token_embd", Q6_K, vocab, hidden), ("output_norm", F32, 1, hidden)]
    for i in range(layers):
        tensors += [(f"blk.{i}.{name}", linear, rows, cols) for name, rows, cols in (
            ("attn_q", queries, hidden), ("attn_k", keys_of_heads, hidden), ("attn_v", keys_of_heads, hidden), ("attn_output", hidden, queries),
            ("ffn_gate", ffn, hidden), ("ffn_up", ffn, hidden), ("ffn_down", hidden, ffn))]
        tensors += [(f"blk.{i}.{name}", F32, 1, cols) for name, cols in (("attn_norm", hidden), ("ffn_norm", hidden), *norms[arch])]
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


def tritmill(args, model, sizes, flags):
    def rows(*sized):
        command = [args.tritmill, "bench", "engine", "--model", model, *flags, "--threads", str(args.threads),
                   "--repetitions", "1", "--json", *sized, *args.extra]
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
    a.add_argument("--shape", default="bitnet-2b", choices=SHAPES)
    a.add_argument("--formats", default="i2_s", help="of Tritmill, with the 2B shape: i2_s, tl2 or both")
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
    if args.bitnet and args.shape != "bitnet-2b":
        a.error(f"bitnet.cpp has no {args.shape}")
    short = args.shape.removeprefix("bitnet-")
    turns = {}  # in this order: name, then a function that returns rates by (phase, batch)
    for name, folder in (("ik_llama.cpp", args.ik), ("bitnet.cpp", args.bitnet)):
        if folder:
            model = os.path.join(args.work, f"{short}-{name.split('.')[0].split('_')[0]}.gguf")
            if not os.path.exists(model):
                write_model(model, PEERS[name][0], **SHAPES[args.shape])
            turns[name] = lambda name=name, folder=folder, model=model: peer(name, folder, model, args, sizes)
    peers = list(turns)
    if args.tritmill:
        has_groups = args.shape.startswith("bonsai")
        ours = os.path.join(args.work, short + ".gguf" * has_groups)
        if not os.path.exists(ours):
            subprocess.run([args.tritmill, "model", "synth", "--shape", args.shape, "--out", ours], check=True)
        for kind in ("int16", "int8") if has_groups else args.formats.split(","):
            flags = ["--activations" if has_groups else "--format", kind]
            turns["tritmill " + kind] = lambda flags=flags: tritmill(args, ours, sizes, flags)
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
