"""Tritmill and litespark-inference side by side: one shape, the same threads, in turns.

    python3 -m venv /tmp/litespark && /tmp/litespark/bin/pip install numpy
    /tmp/litespark/bin/pip install --no-deps litespark-inference==1.0.3     # needs clang or gcc
    cargo build --release
    /tmp/litespark/bin/python benches/peers/litespark/run.py --work /tmp/peer-models

Makes the 2B shape with random weights for each: `tritmill model synth`, and litespark's packed weights in memory
(a head of four bits, the default of its loader). Every round runs each program once for prefill and once for decode.

**Its prefill takes at most 64 tokens a call.** The kernel for many rows (`matmul_lut_avx512_mT`) returns at once, and
writes no output, when a call has more (`LSPK_MAX_T`), and `forward_prefill` hands it all tokens of a prompt. A prompt of
512 tokens in one call therefore multiplies no weight at all. The script shows this first: the logits after a prompt
of 65 tokens or more differ from those after the same prompt token by token, those after pieces of 64 are the same. What
is measured as prefill is a prompt in pieces of 64. `--one-call` adds the time of one call, for comparison with
figures that were measured so.

What differs:
- litespark computes the logits of the last position of each piece, Tritmill of the last position of the prompt. The script
  replaces litespark's head by nothing for all pieces but the last.
- litespark has no batches: decode is measured at batch 1.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, FFN, CONTEXT = 128256, 2560, 30, 20, 5, 6912, 4096
KV = HIDDEN // HEADS * KV_HEADS
PIECE = 64  # most tokens of a call that its kernel computes


def make_model(np):
    from litespark_inference.torchless.model import BitNetConfig, PackedBitNetModel, PackedLayer, PackedProjection

    rng = np.random.default_rng(1)

    def linear(rows, cols):
        codes = rng.integers(0, 3, (rows, cols // 4, 4), dtype=np.uint8)
        packed = codes[..., 0] | codes[..., 1] << 2 | codes[..., 2] << 4 | codes[..., 3] << 6
        return PackedProjection(w_packed=packed, w_sum=None, scale=0.03, in_features=cols, out_features=rows)

    ones = lambda n: np.full(n, 0x3F80, np.uint16)  # bf16
    layers = [PackedLayer(
        q_proj=linear(HIDDEN, HIDDEN), k_proj=linear(KV, HIDDEN), v_proj=linear(KV, HIDDEN), o_proj=linear(HIDDEN, HIDDEN),
        gate_proj=linear(FFN, HIDDEN), up_proj=linear(FFN, HIDDEN), down_proj=linear(HIDDEN, FFN),
        input_norm=ones(HIDDEN), post_attn_norm=ones(HIDDEN), attn_sub_norm=ones(HIDDEN), ffn_sub_norm=ones(FFN),
    ) for _ in range(LAYERS)]
    config = BitNetConfig(hidden_size=HIDDEN, num_layers=LAYERS, num_heads=HEADS, num_kv_heads=KV_HEADS, intermediate_size=FFN,
                          vocab_size=VOCAB, max_position_embeddings=CONTEXT, rms_norm_eps=1e-5, rope_theta=500000.0)
    return PackedBitNetModel(config=config, embed_tokens=None, final_norm=ones(HIDDEN), layers=layers,
                             embed_int4=rng.integers(0, 256, (VOCAB, HIDDEN // 2), dtype=np.uint8),
                             embed_scale=np.full(VOCAB, 0.01, np.float32))


class Litespark:
    """The model, and a prompt of random tokens. Runs in a process of its own, with the threads of OMP_NUM_THREADS."""

    def __init__(self):
        import numpy as np
        from litespark_inference.torchless import runtime

        self.np, self.runtime, self.model = np, runtime, make_model(np)
        self.tokens = np.random.default_rng(2).integers(0, VOCAB, CONTEXT).tolist()

    def prefill(self, count, piece):
        """The logits after `count` tokens, the seconds, and the state."""
        state = self.runtime.init_state(self.model, count + 64)
        began = time.perf_counter()
        for start in range(0, count, piece):
            part = self.tokens[start:min(start + piece, count)]
            if start + len(part) < count and len(part) > 1:
                self.runtime._forward_prefill_hidden(self.model, state, part)
            else:
                logits = self.runtime.forward_prefill(self.model, state, part)
        return logits.copy(), time.perf_counter() - began, state

    def check(self):
        """How far the logits after 65 tokens are from those token by token: in pieces, and in one call."""
        truth, *_ = self.prefill(PIECE + 1, 1)
        far = lambda piece: float(self.np.abs(self.prefill(PIECE + 1, piece)[0] - truth).max() / self.np.abs(truth).max())
        return {"pieces": far(PIECE), "one call": far(PIECE + 1)}

    def turn(self, prefill, one_call, generate):
        _, seconds, _ = self.prefill(prefill, PIECE)
        rates = {"prefill": prefill / seconds}
        if one_call:
            rates["prefill, one call"] = prefill / self.prefill(prefill, prefill)[1]
        logits, _, state = self.prefill(PIECE, PIECE)
        began = time.perf_counter()
        for _ in range(generate):
            logits = self.runtime.forward_one(self.model, state, int(self.np.argmax(logits)))
        return rates | {"decode": generate / (time.perf_counter() - began)}


def serve():
    """Answers a line of JSON on standard input with one on standard output."""
    peer = Litespark()
    for line in sys.stdin:
        name, arguments = json.loads(line)
        print(json.dumps(getattr(peer, name)(*arguments)), flush=True)


def tritmill(args, model):
    def rows(*flags):
        command = [args.tritmill, "bench", "engine", "--model", model, "--threads", str(args.threads), "--batch", "1",
                   "--repetitions", "1", "--json", *flags]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return {row["phase"]: row["tokens_per_s"] for row in json.loads(out)["rows"]}

    return {"prefill": rows("--prompt", str(args.prefill), "--generate", "2")["prefill"],
            "decode": rows("--prompt", str(PIECE), "--generate", str(args.generate))["decode"]}


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--work", required=True, help="folder for Tritmill's model (0.8 GB)")
    a.add_argument("--tritmill", default=os.path.join(HERE, "../../../target/release/tritmill"))
    a.add_argument("--threads", type=int, default=2)
    a.add_argument("--prefill", type=int, default=512)
    a.add_argument("--generate", type=int, default=16)
    a.add_argument("--rounds", type=int, default=3)
    a.add_argument("--one-call", action="store_true")
    a.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = a.parse_args()
    if args.serve:
        return serve()
    os.makedirs(args.work, exist_ok=True)
    ours = os.path.join(args.work, "2b")
    if not os.path.exists(ours):
        subprocess.run([args.tritmill, "model", "synth", "--shape", "bitnet-2b", "--out", ours], check=True)
    # Its numpy calls use BLAS threads too.
    threads = {name: str(args.threads) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    peer = subprocess.Popen([sys.executable, __file__, "--work", args.work, "--serve"], stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, text=True, env=os.environ | threads)

    def ask(name, *arguments):
        peer.stdin.write(json.dumps([name, arguments]) + "\n")
        peer.stdin.flush()
        return json.loads(peer.stdout.readline())

    far = ask("check")
    print(f"logits after {PIECE + 1} tokens against token by token, largest difference by the largest logit: "
          f"in pieces of {PIECE} {far['pieces']:.4f}, in one call {far['one call']:.4f}")
    figures = {}
    for turn in range(args.rounds):
        print(f"round {turn + 1} of {args.rounds}", file=sys.stderr)
        for name, rates in (("litespark", ask("turn", args.prefill, args.one_call, args.generate)), ("tritmill", tritmill(args, ours))):
            for phase, rate in rates.items():
                figures.setdefault((name, phase), []).append(rate)
    median = {key: statistics.median(rates) for key, rates in figures.items()}
    print(f"tokens a second on {args.threads} threads, medians of {args.rounds}; prefill of {args.prefill}, decode of {args.generate} "
          f"after {PIECE}, batch 1")
    for (name, phase), rate in median.items():
        ratio = f", {rate / median['litespark', phase]:.2f} times litespark" if name == "tritmill" else ""
        print(f"{name:10} {phase:18} {rate:7.1f} ({min(figures[name, phase]):.1f} … {max(figures[name, phase]):.1f}){ratio}")
    peer.stdin.close()
    peer.wait()


if __name__ == "__main__":
    main()
