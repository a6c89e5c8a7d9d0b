"""PyTorch for comparison: the shape of BitNet-b1.58-2B-4T in bf16, decoded as fast as plain PyTorch can.

    python3 benches/peers/pytorch/run.py --batch 1,16,64 --context 128,512 --json      (needs a GPU)
    python3 benches/peers/pytorch/run.py --device cpu --shape tiny --batch 1,2 --context 8 --steps 2

Random weights; sizes of all matrices are those of the 2B shape, with squared ReLU, sub-norms and a tied head. The
keys and values have buffers of a fixed size; a decode step is captured once as a CUDA graph, replayed, and
selects the largest logit on the device. Linears are bf16 products (cuBLAS): PyTorch has no ternary products, so
this is the cost of the model with unpacked weights. Prefill runs in steps of 4,096 tokens without a graph. Every
figure is the median of --repetitions, in tokens per second over all sequences.
"""

import argparse
import json
import statistics
import sys
import time

import torch
import torch.nn.functional as F

SHAPES = {
    "2b": dict(vocab=128256, hidden=2560, layers=30, heads=20, kv_heads=5, head_dim=128, ffn=6912),
    "tiny": dict(vocab=1000, hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn=128),
}
EPS, THETA = 1e-5, 500_000.0
PREFILL_TOKENS = 4096


class Model:
    """Weights, keys and values, and the buffers that a captured step reads and writes."""

    def __init__(self, shape, batch, positions, device):
        self.__dict__.update(shape)
        self.batch, self.positions, self.device = batch, positions, device
        self.dtype = torch.bfloat16
        random = lambda *size: torch.randn(*size, device=device, dtype=self.dtype) * size[-1] ** -0.5
        ones = lambda size: torch.ones(size, device=device, dtype=self.dtype)
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.embedding = random(self.vocab, self.hidden)
        self.blocks = [
            dict(
                qkv=random(queries + 2 * keys, self.hidden), o=random(self.hidden, queries),
                gate_up=random(2 * self.ffn, self.hidden), down=random(self.hidden, self.ffn),
                attention_norm=ones(self.hidden), attention_sub_norm=ones(queries),
                ffn_norm=ones(self.hidden), ffn_sub_norm=ones(self.ffn),
            )
            for _ in range(self.layers)
        ]
        self.final_norm = ones(self.hidden)
        at = torch.arange(positions, device=device, dtype=torch.float32)
        rate = THETA ** -(torch.arange(0, self.head_dim, 2, device=device).float() / self.head_dim)
        angles = torch.outer(at, rate).repeat(1, 2)
        self.cos, self.sin = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        cache = (self.layers, 2, batch, self.kv_heads, positions, self.head_dim)
        self.cache = torch.zeros(cache, device=device, dtype=self.dtype)
        # Inputs of a decode step: the last tokens and their positions.
        self.tokens = torch.zeros(batch, 1, device=device, dtype=torch.long)
        self.position = torch.zeros(1, device=device, dtype=torch.long)

    def rotate(self, x, at):
        left, right = x.chunk(2, -1)
        return x * self.cos[at] + torch.cat((-right, left), -1) * self.sin[at]

    def attend(self, layer, block, x, at, rows, visible):
        """Attention of `x` at positions `at` of sequences `rows`; `visible` masks a decode's cache."""
        count, length, _ = x.shape
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        q, k, v = F.linear(x, block["qkv"]).split((queries, keys, keys), -1)
        q, k, v = (t.view(count, length, -1, self.head_dim).transpose(1, 2) for t in (q, k, v))
        q, k = self.rotate(q, at), self.rotate(k, at)
        self.cache[layer, 0, rows].index_copy_(2, at, k)
        self.cache[layer, 1, rows].index_copy_(2, at, v)
        if visible is None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            # The heads of a group take the axis of positions, because kernels with a mask support no groups.
            k, v = self.cache[layer, 0, rows], self.cache[layer, 1, rows]
            groups = q.view(count, self.kv_heads, -1, self.head_dim)
            out = F.scaled_dot_product_attention(groups, k, v, attn_mask=visible).view_as(q)
        out = out.transpose(1, 2).reshape(count, length, queries)
        return F.linear(F.rms_norm(out, (queries,), block["attention_sub_norm"], EPS), block["o"])

    def forward(self, tokens, at, rows, visible):
        """The token with the largest logit after each sequence."""
        norm = lambda x, weight: F.rms_norm(x, (x.shape[-1],), weight, EPS)
        x = F.embedding(tokens, self.embedding)
        for layer, block in enumerate(self.blocks):
            x = x + self.attend(layer, block, norm(x, block["attention_norm"]), at, rows, visible)
            gate, up = F.linear(norm(x, block["ffn_norm"]), block["gate_up"]).chunk(2, -1)
            x = x + F.linear(norm(F.relu(gate).square() * up, block["ffn_sub_norm"]), block["down"])
        logits = F.linear(norm(x[:, -1:], self.final_norm), self.embedding)
        return logits.argmax(-1)

    def prefill(self, prompts):
        """Prefills the sequences in groups of at most PREFILL_TOKENS tokens."""
        length = prompts.shape[1]
        at = torch.arange(length, device=self.device)
        for part in range(0, self.batch, max(1, PREFILL_TOKENS // length)):
            rows = slice(part, min(self.batch, part + max(1, PREFILL_TOKENS // length)))
            self.tokens[rows] = self.forward(prompts[rows], at, rows, None)

    def decode(self):
        visible = torch.arange(self.positions, device=self.device) <= self.position
        tokens = self.forward(self.tokens, self.position, slice(None), visible[None, None, None])
        self.tokens.copy_(tokens)
        self.position.add_(1)

    def captured(self):
        """Returns a function that runs a decode step, as a CUDA graph on a GPU."""
        if self.device == "cpu":
            return self.decode
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.decode()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.decode()
        return graph.replay


def wait(device):
    if device != "cpu":
        torch.cuda.synchronize()


def seconds(device, call):
    wait(device)
    start = time.perf_counter()
    call()
    wait(device)
    return time.perf_counter() - start


def measure(arguments, batch, context):
    device, steps = arguments.device, arguments.steps
    model = Model(SHAPES[arguments.shape], batch, -(-(context + steps + 4) // 64) * 64, device)
    prompts = torch.randint(0, model.vocab, (batch, context), device=device)
    step = model.captured()
    prefills, decodes = [], []
    for repetition in range(arguments.repetitions + 1):
        prefill = seconds(device, lambda: model.prefill(prompts))
        model.position.fill_(context)
        decode = seconds(device, lambda: [step() for _ in range(steps)])
        # The first repetition is a warm-up.
        if repetition > 0:
            prefills.append(batch * context / prefill)
            decodes.append(batch * steps / decode)
    memory = torch.cuda.max_memory_allocated() if device != "cpu" else None
    return dict(
        batch=batch, context=context, prefill_tokens_per_s=statistics.median(prefills),
        decode_tokens_per_s=statistics.median(decodes), memory_bytes=memory,
    )


def main():
    numbers = lambda text: [int(number) for number in text.split(",")]
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu")
    parser.add_argument("--shape", choices=SHAPES, default="2b")
    parser.add_argument("--batch", type=numbers, default=[1, 16, 64, 256], metavar="N,…")
    parser.add_argument("--context", type=numbers, default=[128], metavar="N,…", help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=32, help="tokens to decode after it")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    arguments = parser.parse_args()
    on_cpu = arguments.device == "cpu"
    if not on_cpu and not torch.cuda.is_available():
        sys.exit("PyTorch finds no GPU: --device cpu --shape tiny tries the script")
    rows = []
    with torch.inference_mode():
        for context in arguments.context:
            for batch in arguments.batch:
                if not on_cpu:
                    torch.cuda.reset_peak_memory_stats()
                rows.append(measure(arguments, batch, context))
    name = "cpu" if on_cpu else torch.cuda.get_device_name(arguments.device)
    if arguments.json:
        print(json.dumps(dict(torch=torch.__version__, device=name, shape=arguments.shape, rows=rows)))
        return
    print(f"PyTorch {torch.__version__}, {name}, {arguments.shape} in bf16; tokens/s")
    print(f"{'context':>7} {'batch':>6} {'prefill':>10} {'decode':>10}")
    for row in rows:
        print(f"{row['context']:>7} {row['batch']:>6} {row['prefill_tokens_per_s']:>10.0f} {row['decode_tokens_per_s']:>10.0f}")


if __name__ == "__main__":
    main()
