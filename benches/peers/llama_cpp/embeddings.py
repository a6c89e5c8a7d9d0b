"""Tritmill and llama.cpp's embedding server on one embedding model, with the same threads, in turns: texts a second.

    python3 -m venv /tmp/peer && /tmp/peer/bin/pip install xllamacpp gguf   (the newest llama.cpp, built)
    cargo build --release
    target/release/tritmill model synth --shape bitnet-embedding-0.6b -o /tmp/embedding.gguf
    /tmp/peer/bin/python benches/peers/llama_cpp/embeddings.py --model /tmp/embedding.gguf

llama.cpp knows neither type I2_S nor the norm in front of each linear, and refuses such files. It gets a copy in TQ2_0 (2 bits a
weight, too) without these norms: the same products and attention, and a little less to do beside them. Its vectors are therefore
others; only the time is compared.
llama.cpp multiplies every token of a text by the embedding, for logits that no vector needs; `--vocab 4096` cuts the vocabulary of the
copy, so that this takes little time. Texts are random tokens below 256, no two alike; all of a batch are in one request.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time

import gguf
import xllamacpp

HERE = os.path.dirname(os.path.abspath(__file__))


def copy_without_norms(source, target, vocab):
    """Copies a file without the norms in front of linears, and with the first tokens of its vocabulary."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.get_field("general.architecture").contents())
    for field in reader.fields.values():
        if field.name == "general.architecture" or field.name.startswith("GGUF."):
            continue
        kind, *of_items = field.types
        # A synthetic model has no merges, and the package writes no empty list; texts come as tokens, so that one does no harm.
        value = ["a a"] if field.name == "tokenizer.ggml.merges" and not field.data else field.contents()
        if vocab and field.name in ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.scores"):
            value = value[:vocab]
        if vocab and field.name.endswith("_token_id"):
            value = min(value, vocab - 1)
        writer.add_key_value(field.name, value, kind, sub_type=of_items[0] if of_items else None)
    kept = [tensor for tensor in reader.tensors if "_norm_in." not in tensor.name]
    data = {tensor.name: tensor.data for tensor in kept}
    data["token_embd.weight"] = data["token_embd.weight"][:vocab]
    for tensor in kept:
        of_tensor = data[tensor.name]
        writer.add_tensor_info(tensor.name, of_tensor.shape, of_tensor.dtype, of_tensor.nbytes, tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in kept:
        writer.write_tensor_data(data[tensor.name])
    writer.close()
    print(f"llama.cpp reads a copy without {len(reader.tensors) - len(kept)} norms", file=sys.stderr)


class Llama:
    """An embedding server of llama.cpp in this process."""

    def __init__(self, path, args, texts):
        p = xllamacpp.CommonParams()
        p.model.path = path
        p.embedding = True
        p.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_LAST
        p.n_parallel = texts
        p.n_ctx = texts * (args.prompt + 32)
        # A text must fit a step.
        p.n_batch = p.n_ubatch = max(args.prompt, args.step)
        p.cpuparams.n_threads = p.cpuparams_batch.n_threads = args.threads
        p.warmup = False
        self.server = xllamacpp.Server(p)
        self.prompt = args.prompt

    def texts_per_s(self, size):
        texts = [[random.randrange(256) for _ in range(self.prompt)] for _ in range(size)]
        start = time.perf_counter()
        out = self.server.handle_embeddings({"input": texts})
        took = time.perf_counter() - start
        out = json.loads(out) if isinstance(out, (str, bytes)) else out
        assert len(out["data"]) == size, out
        return size / took


def tritmill(args, sizes):
    command = [args.tritmill, "bench", "engine", "--model", args.model, "--threads", str(args.threads), "--batch",
               ",".join(map(str, sizes)), "--prompt", str(args.prompt), "--repetitions", "1", "--json", *args.extra]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {row["batch"]: row["texts_per_s"] for row in json.loads(out)["rows"]}


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--model", required=True)
    a.add_argument("--tritmill", default=os.path.join(HERE, "../../../target/release/tritmill"))
    a.add_argument("--threads", type=int, default=2)
    a.add_argument("--batch", default="1,8,32", help="texts at once")
    a.add_argument("--prompt", type=int, default=128, help="tokens of a text")
    a.add_argument("--step", type=int, default=512, help="most tokens of a step of llama.cpp (n_ubatch)")
    a.add_argument("--vocab", type=int, help="tokens of llama.cpp's vocabulary")
    a.add_argument("--rounds", type=int, default=3)
    a.add_argument("--peer-only", action="store_true", help="measure llama.cpp alone")
    a.add_argument("extra", nargs="*", help="after --: more flags for tritmill bench engine")
    args = a.parse_args()
    sizes = [int(n) for n in args.batch.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        converted, copy = (os.path.join(folder, name) for name in ("tq2_0.gguf", "copy.gguf"))
        convert = [args.tritmill, "model", "convert", "--model", args.model, "--to", "gguf-tq2_0", "-o", converted]
        subprocess.run(convert, check=True, stdout=subprocess.DEVNULL)
        copy_without_norms(converted, copy, args.vocab)
        os.remove(converted)
        peer = Llama(copy, args, max(sizes))
        figures = {}
        for turn in range(args.rounds):
            print(f"round {turn + 1} of {args.rounds}", file=sys.stderr)
            for size in sizes:
                figures.setdefault(("llama.cpp", size), []).append(peer.texts_per_s(size))
            for size, rate in {} if args.peer_only else tritmill(args, sizes).items():
                figures.setdefault(("tritmill", size), []).append(rate)
    name = os.path.basename(args.model)
    print(f"{name}, {args.threads} threads, texts of {args.prompt} tokens, llama.cpp with {args.vocab or 'all'} tokens of its vocabulary, medians of {args.rounds} {args.extra}")
    print(f"{'texts at once':>13} {'llama.cpp':>10} {'tritmill':>9} ratio")
    for size in sizes:
        theirs = statistics.median(figures["llama.cpp", size])
        ours = statistics.median(figures.get(("tritmill", size), [float("nan")]))
        print(f"{size:13} {theirs:10.3f} {ours:9.3f} {ours / theirs:5.2f}")


if __name__ == "__main__":
    main()
