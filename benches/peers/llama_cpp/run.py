"""Tritmill and llama.cpp side by side: the same shapes, the same threads, in turns.

    python3 -m venv /tmp/peer
    /tmp/peer/bin/pip install llama-cpp-python gguf        (builds llama.cpp for this machine)
    cargo build --release
    /tmp/peer/bin/python benches/peers/llama_cpp/run.py --work /tmp/peer-models

Makes the 2B shape for both (`tritmill model synth`; for llama.cpp a GGUF with TQ2_0 linears and a
Q6_K embedding that is also the head, its own preference), then runs A, B, A, B … and prints medians
and ratios. llama.cpp has no squared ReLU for this architecture, so its model has SiLU there; sizes
of all matrices are the same. Sampling is not measured, except for Tritmill's search for the largest logit.
"""

import argparse
import ctypes
import json
import os
import random
import statistics
import subprocess
import sys
import time

import gguf
import llama_cpp as lc
import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, FFN, CONTEXT = 128256, 2560, 30, 20, 5, 6912, 4096
HEAD = HIDDEN // HEADS
BLOCK = 256  # weights of a TQ2_0 or Q6_K block


def ternary(rng, rows, cols):
    """Random TQ2_0 rows: 64 bytes of four 2-bit codes 0 to 2, then a half-precision scale."""
    blocks = cols // BLOCK
    codes = rng.integers(0, 3, (rows, blocks, 4, 64), dtype=np.uint8)
    packed = codes[:, :, 0] | codes[:, :, 1] << 2 | codes[:, :, 2] << 4 | codes[:, :, 3] << 6
    scale = np.full((rows, blocks, 1), 0.03, np.float16).view(np.uint8).reshape(rows, blocks, 2)
    return np.concatenate([packed, scale], -1).reshape(rows, blocks * 66)


def q6_k(rng, rows, cols):
    """Random Q6_K rows: 128 low and 64 high bytes, 16 int8 scales, a half-precision scale."""
    blocks = cols // BLOCK
    quants = rng.integers(0, 256, (rows, blocks, 192), dtype=np.uint8)
    scales = rng.integers(8, 32, (rows, blocks, 16), dtype=np.uint8)
    scale = np.full((rows, blocks, 1), 1e-4, np.float16).view(np.uint8).reshape(rows, blocks, 2)
    return np.concatenate([quants, scales, scale], -1).reshape(rows, blocks * 210)


def write_model(path):
    rng = np.random.default_rng(1)
    kind = gguf.GGMLQuantizationType
    w = gguf.GGUFWriter(path + ".new", "bitnet")
    w.add_name("peer-2b")
    w.add_context_length(CONTEXT)
    w.add_embedding_length(HIDDEN)
    w.add_block_count(LAYERS)
    w.add_feed_forward_length(FFN)
    w.add_head_count(HEADS)
    w.add_head_count_kv(KV_HEADS)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_rope_freq_base(500000.0)
    w.add_vocab_size(VOCAB)
    w.add_tokenizer_model("no_vocab")
    quantized = lambda name, data, dtype: w.add_tensor(name, data, raw_dtype=dtype)
    ones = lambda name, n: w.add_tensor(name, np.ones(n, np.float32))
    quantized("token_embd.weight", q6_k(rng, VOCAB, HIDDEN), kind.Q6_K)
    ones("output_norm.weight", HIDDEN)
    for i in range(LAYERS):
        for name, rows, cols in (("attn_q", HIDDEN, HIDDEN), ("attn_k", KV_HEADS * HEAD, HIDDEN),
                                 ("attn_v", KV_HEADS * HEAD, HIDDEN), ("attn_output", HIDDEN, HIDDEN),
                                 ("ffn_gate", FFN, HIDDEN), ("ffn_up", FFN, HIDDEN), ("ffn_down", HIDDEN, FFN)):
            quantized(f"blk.{i}.{name}.weight", ternary(rng, rows, cols), kind.TQ2_0)
        for name, n in (("attn_norm", HIDDEN), ("attn_sub_norm", HIDDEN), ("ffn_norm", HIDDEN), ("ffn_sub_norm", FFN)):
            ones(f"blk.{i}.{name}.weight", n)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    os.replace(path + ".new", path)


class Llama:
    """One model of llama.cpp; every call of `rate` starts from an empty cache."""

    def __init__(self, path, threads, prompt, generate, most):
        lc.llama_backend_init()
        self.quiet = lc.llama_log_callback(lambda level, text, data: None)
        lc.llama_log_set(self.quiet, ctypes.c_void_p(0))
        self.model = lc.llama_model_load_from_file(path.encode(), lc.llama_model_default_params())
        if not self.model:
            sys.exit(f"llama.cpp cannot load {path}")
        p = lc.llama_context_default_params()
        p.n_ctx = most * (prompt + generate + 16)
        p.n_batch = p.n_ubatch = 512
        p.n_seq_max = most
        p.n_threads = p.n_threads_batch = threads
        self.ctx = lc.llama_init_from_model(self.model, p)
        self.batch = lc.llama_batch_init(512, 0, 1)
        self.prompt, self.generate = prompt, generate

    def decode(self, rows):
        """One call with `rows` of (token, position, sequence, wants logits)."""
        b = self.batch
        b.n_tokens = len(rows)
        for i, (token, position, sequence, logits) in enumerate(rows):
            b.token[i], b.pos[i], b.n_seq_id[i], b.logits[i] = token, position, 1, logits
            b.seq_id[i][0] = sequence
        if lc.llama_decode(self.ctx, b) != 0:
            sys.exit("llama_decode failed")
        lc.llama_synchronize(self.ctx)

    def rate(self, phase, size):
        token = lambda: random.randrange(VOCAB)
        lc.llama_memory_clear(lc.llama_get_memory(self.ctx), True)
        started = time.perf_counter()
        for sequence in range(size):
            for at in range(0, self.prompt, 512):
                end = min(at + 512, self.prompt)
                self.decode([(token(), i, sequence, i == self.prompt - 1) for i in range(at, end)])
        if phase == "prefill":
            return size * self.prompt / (time.perf_counter() - started)
        started = time.perf_counter()
        for step in range(self.generate):
            self.decode([(token(), self.prompt + step, sequence, True) for sequence in range(size)])
        return size * self.generate / (time.perf_counter() - started)


def tritmill(args, model, sizes, fmt):
    command = [args.tritmill, "bench", "engine", "--model", model, "--format", fmt, "--threads", str(args.threads),
               "--batch", ",".join(map(str, sizes)), "--prompt", str(args.prompt), "--generate", str(args.generate),
               "--repetitions", "1", "--json", *args.extra]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {(row["phase"], row["batch"]): row["tokens_per_s"] for row in json.loads(out)["rows"]}


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--work", required=True, help="folder for the models (2.1 GB)")
    a.add_argument("--tritmill", default=os.path.join(HERE, "../../../target/release/tritmill"))
    a.add_argument("--threads", type=int, default=2)
    a.add_argument("--formats", default="i2_s")
    a.add_argument("--batch", default="1,4,8,16,32")
    a.add_argument("--prompt", type=int, default=128)
    a.add_argument("--generate", type=int, default=32)
    a.add_argument("--rounds", type=int, default=3)
    a.add_argument("--json", action="store_true")
    a.add_argument("extra", nargs="*", help="after --: more flags for tritmill bench engine")
    args = a.parse_args()
    sizes = [int(n) for n in args.batch.split(",")]
    os.makedirs(args.work, exist_ok=True)
    ours, theirs = os.path.join(args.work, "2b"), os.path.join(args.work, "2b-tq2_0.gguf")
    if not os.path.exists(ours):
        subprocess.run([args.tritmill, "model", "synth", "--shape", "bitnet-2b", "--out", ours], check=True)
    if not os.path.exists(theirs):
        write_model(theirs)
    peer = Llama(theirs, args.threads, args.prompt, args.generate, max(sizes))
    # The batch size does not change a prefill, which is bound by compute.
    points = [("prefill", 1)] + [("decode", n) for n in sizes]
    figures = {}
    for turn in range(args.rounds):
        print(f"round {turn + 1} of {args.rounds}", file=sys.stderr)
        for point in points:
            figures.setdefault(("llama.cpp", *point), []).append(peer.rate(*point))
        for fmt in args.formats.split(","):
            for point, rate in tritmill(args, ours, sizes, fmt).items():
                figures.setdefault((fmt, *point), []).append(rate)
    median = {key: statistics.median(values) for key, values in figures.items()}
    print(f"{args.threads} threads, prompt {args.prompt}, generate {args.generate}, "
          f"medians of {args.rounds}; llama-cpp-python {lc.__version__}")
    print(f"{'phase':8} {'batch':>5} {'llama.cpp TQ2_0':>16} " + " ".join(f"{f:>8} ratio" for f in args.formats.split(",")))
    for phase, n in points:
        base = median["llama.cpp", phase, n]
        cells = [f"{median[f, phase, n]:8.1f} {median[f, phase, n] / base:5.2f}" for f in args.formats.split(",")]
        print(f"{phase:8} {n:5} {base:16.1f} " + " ".join(cells))
    if args.json:
        print(json.dumps([{"program": k[0], "phase": k[1], "batch": k[2], "tokens_per_s": round(v, 2)} for k, v in median.items()]))


if __name__ == "__main__":
    main()
