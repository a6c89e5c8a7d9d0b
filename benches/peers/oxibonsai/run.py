"""Tritmill and oxibonsai 0.2.3 side by side: the same weights, the same threads, in turns.

    cargo build --release
    python3 benches/peers/oxibonsai/run.py --work /tmp/peer-models

Makes a Ternary Bonsai with random weights (`tritmill model synth`) and the same one as oxibonsai reads it, builds the driver
in this folder (crates.io; for the machine it runs on), checks the peer, and then runs each program once a round.

What oxibonsai does on a CPU, by its source and as checked here:
- It loads `qwen3` files in which all linears of the layers are of one type. The ternary one is TQ2_0_g128, a layout of its
  own under the type number 42: 32 bytes of codes, then the scale. PQ2_0 (142) is refused; of PrismML's files with 128
  weights a block under the number 42, where the scale comes first, it takes two bytes of codes for the scale. TQ2_0 (35)
  has kernels, but no model uses them. The head must be there by name, so the peer's file names the embedding's bytes
  twice. Its weights are those of Tritmill's file, bit by bit, and the logits of the two programs are compared.
- Weights become floats and are multiplied with float activations: AVX-512 or AVX2 and FMA, found at run time (the crate's
  `simd-…` features do nothing), row by row, on the threads of rayon. Tritmill rounds activations to 16 bits
  by default for such models (`-- --activations int8`: 8 bits). The peer's KV cache holds f32, Tritmill's f16.
- **It has no product of several tokens on a CPU**: `forward_prefill` calls `forward` for each token, which computes the
  head, too, and there is no way to leave it out. Tritmill computes the head for the last position only.
- It has no batch either: `batch_generate` runs one prompt after another, its continuous batching computes the whole
  context again for every token, and its server keeps replicas of the engine that share the weights. Batches are measured
  as such replicas, one for each sequence, all on the same threads; each reads the weights for itself.
- The driver calls the engine on a thread of rayon's pool, where the start of a product does not wait for another thread.
  It is built for the machine, with the link-time optimization of the crate's own workspace.
- Both take the largest logit; Tritmill computes only those that can be the largest (`-- --all-logits`: all).
- YaRN is not read from the file. The random model has none.
"""

import argparse
import array
import json
import mmap
import os
import random
import statistics
import struct
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
HEAD, EMBEDDING = "output.weight", "token_embd.weight"
F32, F16, TQ2_0_G128, PQ2_0 = 0, 1, 42, 142  # type numbers of tensors
BLOCK, BLOCK_BYTES = 128, 34
VALUE_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # by the number of a metadata type
STRING, ARRAY = 8, 9


class Header:
    """What stands in front of the tensors of a GGUF file."""

    def __init__(self, data):
        self.data, self.at = data, 4
        self.version, tensors, self.entries = self.take("<IQQ")
        began, alignment = self.at, 32
        for _ in range(self.entries):
            key = self.text()
            value = self.value(*self.take("<I"))
            if key == "general.alignment":
                alignment = value
        self.metadata, self.alignment = data[began:self.at], alignment
        self.tensors = []  # name, sizes (innermost first), type, offset
        for _ in range(tensors):
            name, [dimensions] = self.text(), self.take("<I")
            sizes = self.take(f"<{dimensions}Q")
            self.tensors.append((name, sizes, *self.take("<IQ")))
        self.end = self.aligned(self.at)

    def aligned(self, length):
        return -(-length // self.alignment) * self.alignment

    def take(self, form):
        values = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return values

    def text(self):
        [length] = self.take("<Q")
        self.at += length
        return self.data[self.at - length:self.at].decode()

    def value(self, kind):
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            kind, count = self.take("<IQ")
            return [self.value(kind) for _ in range(count)]
        self.at += VALUE_BYTES[kind]
        return int.from_bytes(self.data[self.at - VALUE_BYTES[kind]:self.at], "little")

    def write(self, tensors):
        """The header with other tensors."""
        text = lambda text: struct.pack("<Q", len(text.encode())) + text.encode()
        out = b"GGUF" + struct.pack("<IQQ", self.version, len(tensors), self.entries) + self.metadata
        for name, sizes, kind, offset in tensors:
            out += text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)
        return out.ljust(self.aligned(len(out)), b"\0")


def rewrite(ours, theirs):
    """Writes the model as oxibonsai reads it: scales after the codes of each block, and the head by name."""
    with open(ours, "rb") as file:
        data = file.read()
    header = Header(data)
    weights, tensors = bytearray(data[header.end:]), []
    for name, sizes, kind, offset in header.tensors:
        if kind == PQ2_0:
            end = offset + sizes[0] * sizes[1] // BLOCK * BLOCK_BYTES
            blocks = weights[offset:end]
            for byte in range(BLOCK_BYTES):
                blocks[byte::BLOCK_BYTES] = weights[offset + (byte + 2) % BLOCK_BYTES:end:BLOCK_BYTES]
            weights[offset:end], kind = blocks, TQ2_0_G128
        elif kind not in (F32, F16):
            sys.exit(f"{ours}: {name} has the type {kind}, PQ2_0 ({PQ2_0}) was expected")
        tensors.append((name, sizes, kind, offset))
    by_name = {tensor[0]: tensor for tensor in tensors}
    if HEAD not in by_name:
        tensors.append((HEAD, *by_name[EMBEDDING][1:]))
    with open(theirs + ".part", "wb") as file:
        file.write(header.write(tensors))
        file.write(weights)
    os.replace(theirs + ".part", theirs)


def vocabulary(model):
    with open(model, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return next(sizes[1] for name, sizes, *_ in Header(data).tensors if name == EMBEDDING)


class Peer:
    """The driver of this folder: one process for each question."""

    def __init__(self, args, model):
        built = os.path.join(args.work, "oxibonsai-build")
        flags = {"RUSTFLAGS": "-C target-cpu=native", "CARGO_TARGET_DIR": built}
        command = ["cargo", "build", "--release", "--locked", "--manifest-path", os.path.join(HERE, "Cargo.toml")]
        subprocess.run(command, check=True, env=os.environ | flags)
        self.program, self.model, self.threads = os.path.join(built, "release/oxibonsai-peer"), model, args.threads

    def ask(self, what):
        question = json.dumps({"model": self.model, "threads": self.threads, "what": what})
        done = subprocess.run([self.program], input=question, text=True, stdout=subprocess.PIPE)
        if done.returncode:
            sys.exit(f"the driver failed with {done.returncode}")
        return json.loads(done.stdout)


class Tritmill:
    def __init__(self, args, model):
        self.args, self.model = args, model

    def run(self, *words):
        command = [self.args.tritmill, *words, "--model", self.model, "--threads", str(self.args.threads), "--json"]
        done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        if done.returncode:
            sys.exit(f"{' '.join(command[:3])} failed: {done.stderr.strip()}")
        return json.loads(done.stdout)

    def rates(self, prompt, sizes, generate):
        rows = self.run("bench", "engine", "--prompt", str(prompt), "--batch", ",".join(map(str, sizes)), "--generate",
                        str(generate), "--repetitions", "1", *self.args.extra)["rows"]
        return {(row["phase"], row["batch"]): row["tokens_per_s"] for row in rows}

    def largest(self, tokens):
        return self.run("model", "logits", "--tokens", ",".join(map(str, tokens)), "--top", "1")["top"][0]["id"]

    def logits(self, tokens):
        """The logits after each token."""
        with tempfile.NamedTemporaryFile(dir=self.args.work) as file:
            vocab = self.run("model", "logits", "--tokens", ",".join(map(str, tokens)), "-o", file.name)["vocab"]
            values = array.array("f")
            values.frombytes(file.read())
        return [values[start:start + vocab] for start in range(0, len(values), vocab)]


def check(peer, ours, vocab, generate=8, length=32):
    """Shows that the peer computes, and the same as Tritmill; ends the program if its logits say otherwise."""
    prompt = [random.randrange(vocab) for _ in range(length)]
    found = peer.ask({"check": {"prompt": prompt, "generate": generate}})
    longer = found["seconds"] / found["half_seconds"]
    # After the prompt and the peer's own tokens, so that one that differs does not change those after it.
    after = ours.logits(prompt + found["generated"][:-1])[length - 1:]
    alike = sum(max(range(vocab), key=row.__getitem__) == token for row, token in zip(after, found["generated"]))
    apart = max(abs(after[0][token] - logit) for token, logit in found["top"]) / found["top"][0][1]
    print(f"oxibonsai on {found['tier']}: {length} tokens in one call {found['seconds']:.2f} s, half of them "
          f"{found['half_seconds']:.2f} s ({longer:.2f} times as long)")
    print(f"its logits, largest difference by the largest logit: token by token {found['far_by_token']:.1e}, "
          f"after another first token {found['far_changed']:.1e}")
    print(f"against Tritmill: {alike} of {generate} greedy tokens are the same, the {len(found['top'])} largest logits differ by "
          f"{apart:.1e} of the largest")
    if not 1.5 < longer < 2.5:
        print("twice the tokens should take about twice as long: either the machine is busy, or the peer leaves work out")
    bad = [text for text, wrong in {
        "one call and single tokens differ": found["far_by_token"] > 1e-3,
        "the first token of a prompt changes nothing": found["far_changed"] < 1e-3,
        "the two programs compute different models": apart > 0.05 or alike < generate - 2,
    }.items() if wrong]
    if bad:
        sys.exit(f"no comparison: {', '.join(bad)}")


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--work", required=True, help="folder for the two models (1 GB) and the driver's build (1 GB)")
    a.add_argument("--tritmill", default=os.path.join(HERE, "../../../target/release/tritmill"))
    a.add_argument("--shape", default="bonsai-1.7b", help="bonsai-1.7b, bonsai-4b, bonsai-8b")
    a.add_argument("--layers", type=int, help="fewer layers than the shape has, for a quick look")
    a.add_argument("--threads", type=int, default=2)
    a.add_argument("--batch", default="1,8,32")
    a.add_argument("--prefill", type=int, default=512)
    a.add_argument("--short", type=int, default=8, help="tokens before measured decodes")
    a.add_argument("--generate", type=int, default=16)
    a.add_argument("--rounds", type=int, default=3)
    a.add_argument("extra", nargs="*", help="after --: more flags for tritmill bench engine")
    args = a.parse_args()
    random.seed(1)
    sizes = [int(size) for size in args.batch.split(",")]
    os.makedirs(args.work, exist_ok=True)
    name = args.shape + (f"-{args.layers}-layers" if args.layers else "")
    model, theirs = (os.path.join(args.work, f"{name}{end}.gguf") for end in ("", "-oxibonsai"))
    if not os.path.exists(model):
        layers = ["--layers", str(args.layers)] if args.layers else []
        subprocess.run([args.tritmill, "model", "synth", "--shape", args.shape, "-o", model, *layers], check=True)
    if not os.path.exists(theirs):
        rewrite(model, theirs)
    vocab = vocabulary(model)
    peer, ours = Peer(args, theirs), Tritmill(args, model)
    check(peer, ours, vocab)
    tokens = lambda count: [random.randrange(vocab) for _ in range(count)]
    prompt, short, figures = tokens(args.prefill), tokens(args.short), {}
    add = lambda of, key, rate: figures.setdefault((of, *key), []).append(rate)
    for turn in range(args.rounds):
        print(f"round {turn + 1} of {args.rounds}", file=sys.stderr)
        found = peer.ask({"measure": {"prompt": prompt, "short": short, "generate": args.generate, "batches": sizes}})
        if turn == 0 and ours.largest(prompt) not in [token for token, _ in found["top"]]:
            sys.exit("no comparison: the measured prefill has other logits than Tritmill's")
        add("oxibonsai", ("prefill", 1), found["prefill"])
        for size, rate in zip(sizes, found["decode"]):
            add("oxibonsai", ("decode", size), rate)
        add("tritmill", ("prefill", 1), ours.rates(args.prefill, [1], 1)["prefill", 1])
        for key, rate in ours.rates(args.short, sizes, args.generate).items():
            if key[0] == "decode":
                add("tritmill", key, rate)
    print(f"{name}, tokens a second on {args.threads} threads, medians of {args.rounds}; prefill of {args.prefill}, decode of "
          f"{args.generate} after {args.short} {' '.join(args.extra)}")
    print(f"{'phase':8} {'batch':>5} {'oxibonsai':>10} {'tritmill':>9} ratio")
    for key in [("prefill", 1)] + [("decode", size) for size in sizes]:
        a, b = (statistics.median(figures[of, *key]) for of in ("oxibonsai", "tritmill"))
        print(f"{key[0]:8} {key[1]:5} {a:10.2f} {b:9.2f} {b / a:5.2f}")


if __name__ == "__main__":
    main()
