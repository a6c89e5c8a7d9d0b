"""Trains the date model: a BitNet b1.58 transformer over bytes, on PyTorch and the CPU.

    python3 train.py --out /tmp/dates            train (resumes from /tmp/dates/last.pt)
    python3 export.py /tmp/dates/last.pt         write model/ and eval.jsonl, evaluate

A training row is BOS, the bytes of the line, a newline, the date as YYYY-MM-DD, EOS. The loss is
on the date and EOS only. The forward pass is the one of the exported model: ternary weights
(absmean) and int8 activations (per-token absmax), both with straight-through gradients.
"""

import argparse
import itertools
import json
import math
import os
import random
import time

import torch
import torch.nn.functional as F

from data import Lines

BOS, EOS, PAD = 256, 257, 258
VOCAB, HIDDEN, LAYERS, HEADS, KV, HEAD, FFN = 259, 256, 4, 8, 4, 32, 768
EPS, THETA, ANSWER = 1e-5, 10000.0, 11  # the answer is ten characters and EOS
WARMUP, TURN, SETTLE, AGAIN, COUNTED, LAST = 100, 1300, 1600, 3500, 4500, 5000  # where the rate changes course
SHAPES = {
    "self_attn.q_proj": (HEADS * HEAD, HIDDEN), "self_attn.k_proj": (KV * HEAD, HIDDEN),
    "self_attn.v_proj": (KV * HEAD, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
    "mlp.gate_proj": (FFN, HIDDEN), "mlp.up_proj": (FFN, HIDDEN), "mlp.down_proj": (HIDDEN, FFN),
}
NORMS = {"input_layernorm": HIDDEN, "self_attn.attn_sub_norm": HEADS * HEAD,
         "post_attention_layernorm": HIDDEN, "mlp.ffn_sub_norm": FFN}


class NormQuant(torch.autograd.Function):
    """RMSNorm with weight, then per-token int8 rounding (straight through in the backward pass)."""

    @staticmethod
    def forward(ctx, x, w):
        r = torch.rsqrt((x.norm(dim=-1, keepdim=True) ** 2) / x.shape[-1] + EPS)
        ctx.save_for_backward(x, w, r)
        y = (x * r).mul_(w)
        peak = torch.maximum(y.amax(-1, keepdim=True), -y.amin(-1, keepdim=True)).clamp_(min=1e-5)
        s = 127.0 / peak
        return y.mul_(s).round_().div_(s)

    @staticmethod
    def backward(ctx, g):
        x, w, r = ctx.saved_tensors
        gx = (g * x).view(-1, x.shape[-1])
        dw = (r.view(1, -1) @ gx).view(-1)
        c = (gx @ w.unsqueeze(1)).view(r.shape).mul_(r ** 3 / x.shape[-1])
        return (g * w).mul_(r).sub_(x * c), dw


class SquaredReluGate(torch.autograd.Function):
    """relu(gate)² · up, the two halves of one matrix product."""

    @staticmethod
    def forward(ctx, gu):
        gate, up = gu.chunk(2, -1)
        a = gate.clamp(min=0)
        ctx.save_for_backward(a, up)
        return (a * a).mul_(up)

    @staticmethod
    def backward(ctx, g):
        a, up = ctx.saved_tensors
        out = torch.empty(*a.shape[:-1], 2 * a.shape[-1])
        ga = g * a
        torch.mul(ga, up, out=out[..., : a.shape[-1]])
        out[..., : a.shape[-1]].mul_(2)
        torch.mul(ga, a, out=out[..., a.shape[-1]:])
        return out


class Ternary(torch.autograd.Function):
    """clamp(round(W / mean|W|), -1, 1) · mean|W|, straight through."""

    @staticmethod
    def forward(ctx, w):
        m = w.abs().mean().clamp(min=1e-5)
        return (w / m).round_().clamp_(-1, 1).mul_(m)

    @staticmethod
    def backward(ctx, g):
        return g


def rope_tables(n):
    inv = THETA ** (-torch.arange(0, HEAD, 2, dtype=torch.float32) / HEAD)
    angle = torch.outer(torch.arange(n, dtype=torch.float32), inv)
    return torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)


def rope(x, cos, sin):  # x [B, T, heads, HEAD]; cos, sin [T, 1, HEAD] or [B, T, 1, HEAD]
    half = HEAD // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x * cos + turned * sin


class Model(torch.nn.Module):
    def __init__(self, seed):
        super().__init__()
        gen = torch.Generator().manual_seed(seed)

        def normal(shape, std):
            return torch.nn.Parameter(torch.randn(shape, generator=gen) * std)

        self.p = torch.nn.ParameterDict()
        self.p["embed_tokens"] = normal((VOCAB, HIDDEN), 0.04)
        for layer in range(LAYERS):
            for name, shape in SHAPES.items():
                std = 0.01 if name.endswith(("o_proj", "down_proj")) else 0.02
                self.p[f"{layer}.{name}".replace(".", "/")] = normal(shape, std)
            for name, n in NORMS.items():
                self.p[f"{layer}.{name}".replace(".", "/")] = torch.nn.Parameter(torch.ones(n))
        self.p["norm"] = torch.nn.Parameter(torch.ones(HIDDEN))
        self.cos, self.sin = rope_tables(512)

    def get(self, layer, name):
        return self.p[f"{layer}.{name}".replace(".", "/")]

    def forward(self, ids, at):
        """Logits at the positions `at` [B, A] of `ids` [B, T]: [B, A, VOCAB]."""
        batch, length = ids.shape
        group = HEADS // KV
        x = self.p["embed_tokens"][ids]
        cos, sin = self.cos[:length, None], self.sin[:length, None]
        causal = torch.full((length, length), -1e9).triu_(1)
        bias = causal.repeat(group, 1)  # [group * T, T]
        for layer in range(LAYERS):
            weight = {name: Ternary.apply(self.get(layer, name)) for name in SHAPES}
            h = NormQuant.apply(x, self.get(layer, "input_layernorm"))
            kv = F.linear(h, torch.cat([weight["self_attn.k_proj"], weight["self_attn.v_proj"]]))
            k, v = kv.view(batch, length, 2, KV, HEAD).unbind(2)
            k = rope(k, cos, sin).permute(0, 2, 3, 1).reshape(batch * KV, HEAD, length)
            v = v.transpose(1, 2).reshape(batch * KV, length, HEAD)
            count = length
            if layer == LAYERS - 1:  # from here on only the positions that are read matter
                count = at.shape[1]
                rows = torch.arange(batch)[:, None]
                h, x = h[rows, at], x[rows, at]
                cos, sin = self.cos[at][:, :, None], self.sin[at][:, :, None]
                bias = causal[at].repeat(1, group, 1).repeat_interleave(KV, 0)
            q = F.linear(h, weight["self_attn.q_proj"]).view(batch, count, HEADS, HEAD)
            q = rope(q, cos, sin).mul_(HEAD ** -0.5)
            q = q.transpose(1, 2).reshape(batch * KV, group * count, HEAD)
            o = torch.softmax(torch.bmm(q, k).add_(bias), -1).bmm(v)
            o = o.view(batch, HEADS, count, HEAD).transpose(1, 2).reshape(batch, count, HEADS * HEAD)
            h = NormQuant.apply(o, self.get(layer, "self_attn.attn_sub_norm"))
            x = x + F.linear(h, weight["self_attn.o_proj"])
            h = NormQuant.apply(x, self.get(layer, "post_attention_layernorm"))
            h = SquaredReluGate.apply(F.linear(h, torch.cat([weight["mlp.gate_proj"], weight["mlp.up_proj"]])))
            h = NormQuant.apply(h, self.get(layer, "mlp.ffn_sub_norm"))
            x = x + F.linear(h, weight["mlp.down_proj"])
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * self.p["norm"]
        return F.linear(x, self.p["embed_tokens"])


def collate(pairs):
    """Rows padded at the end, the positions that predict the answer, and the answer."""
    rows = [[BOS, *text.encode(), 10, *date.encode(), EOS] for text, date in pairs]
    length = max(map(len, rows)) - 1
    ids = torch.tensor([r[:-1] + [PAD] * (length + 1 - len(r)) for r in rows])
    at = torch.tensor([range(len(r) - 1 - ANSWER, len(r) - 1) for r in rows])
    return ids, at, torch.tensor([r[-ANSWER:] for r in rows])


def batches(seed, size, pool=16):
    """Endless batches of lines of similar length, in random order of length."""
    lines, rng = Lines(seed), random.Random(seed)
    for step in itertools.count(1, pool):
        lines.stage(step)
        drawn = sorted((next(lines) for _ in range(size * pool)), key=lambda p: len(p[0].encode()))
        chunks = [drawn[i : i + size] for i in range(0, len(drawn), size)]
        rng.shuffle(chunks)
        yield from map(collate, chunks)


@torch.no_grad()
def accuracy(model, pairs):
    """The share of lines with a completely right answer. With the right answer as input every argmax
    is right exactly when greedy decoding gives that answer, so no decoding is needed."""
    pairs = sorted(pairs, key=lambda p: len(p[0].encode()))
    good = 0
    for i in range(0, len(pairs), 100):
        ids, at, want = collate(pairs[i : i + 100])
        good += int((model(ids, at).argmax(-1) == want).all(-1).sum())
    return good / len(pairs)


def learning_rate(step, steps):
    """The share of the peak rate: a linear warm-up, half of a falling cosine, a slower straight
    line, from SETTLE, where steadier averages take over too, a line from 30 % to 1 %, and from
    AGAIN, from COUNTED and from LAST one from 20 % to 0.5 %."""
    if step <= WARMUP:
        return step / WARMUP
    if step <= TURN:
        return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi / 2 * (step - WARMUP) / (TURN - WARMUP)))
    if step <= SETTLE:
        return 0.525 - 0.475 * (step - TURN) / 1900
    if step <= AGAIN:
        return 0.3 - 0.29 * (step - SETTLE) / (AGAIN - SETTLE)
    if step <= COUNTED:
        return 0.2 - 0.195 * (step - AGAIN) / (COUNTED - AGAIN)
    if step <= LAST:
        return 0.2 - 0.195 * (step - COUNTED) / (LAST - COUNTED)
    return 0.2 - 0.195 * (step - LAST) / (steps - LAST)


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--out", default="/tmp/dates", help="folder of the checkpoints")
    a.add_argument("--log", default=os.path.join(os.path.dirname(os.path.abspath(__file__)), "train.log"))
    a.add_argument("--seed", type=int, default=1)
    a.add_argument("--steps", type=int, default=7000)
    a.add_argument("--stop", type=int, help="stop early at this step, for a trial")
    a.add_argument("--batch", type=int, default=64)
    a.add_argument("--lr", type=float, default=2e-3)
    a.add_argument("--threads", type=int, default=2)
    args = a.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    os.makedirs(args.out, exist_ok=True)

    model = Model(args.seed)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    opt = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}],
                            lr=args.lr, betas=(0.9, 0.95))
    source = batches(1000 + args.seed, args.batch)
    checkpoint = os.path.join(args.out, "last.pt")
    start, spent = 0, 0.0
    if os.path.exists(checkpoint):
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        opt.load_state_dict(state["opt"])
        start, spent = state["step"], state["seconds"]
        for _ in range(start):
            next(source)
    fresh = Lines(2_000_000 + args.seed, "fresh")
    watch = [next(fresh) for _ in range(400)]
    log = open(args.log, "a" if start else "w", buffering=1)
    note = lambda **kv: log.write(json.dumps(kv) + "\n")
    if start == 0:
        note(args={k: v for k, v in vars(args).items() if k not in ("out", "log")}, torch=torch.__version__,
             parameters=sum(p.numel() for p in model.parameters()))
    began, total = time.time(), 0.0
    for step in range(start + 1, args.steps + 1):
        rate = learning_rate(step, args.steps)
        for group in opt.param_groups:
            group["lr"] = args.lr * rate
            group["betas"] = (0.9, 0.95 if step <= SETTLE else 0.99)
        ids, at, want = next(source)
        loss = F.cross_entropy(model(ids, at).flatten(0, 1), want.flatten())
        opt.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        total += loss.item()
        seconds = spent + time.time() - began
        if step % 10 == 0:
            note(step=step, loss=round(total / 10, 5), lr=round(args.lr * rate, 6), seconds=round(seconds, 1))
            total = 0.0
        if step % 100 == 0 or step == args.steps:
            note(step=step, accuracy=accuracy(model, watch), lines=len(watch), seconds=round(seconds, 1))
            torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "step": step,
                        "seconds": spent + time.time() - began, "args": vars(args)}, checkpoint + ".new")
            os.replace(checkpoint + ".new", checkpoint)
        if step == args.stop:
            break


if __name__ == "__main__":
    main()
