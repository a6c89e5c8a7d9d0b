"""Trains the exported date model on to answer with JSON as well, where a schema asks for it.

    python3 train_json.py --out /tmp/dates-json                          from model/ to /tmp/dates-json/last.pt
    python3 train_json.py --from /tmp/dates-json/last.pt --out /tmp/again --seed 12 --steps 700
    python3 export.py /tmp/again/last.pt                                 write model/ and eval.jsonl

Every other batch is one of train.py. In the others the answer is {"date":"YYYY-MM-DD"}
and EOS; its first byte is given, since only a schema chooses between the two forms. The weights
begin as the exported ternary values, at 1.5 scales from zero at two thirds of the entries, so
that the rounded model is the same to the bit before the first step.
"""

import argparse
import json
import math
import os
import random
import time

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from data import Lines
from train import BOS, EOS, LAYERS, NORMS, PAD, SHAPES, Model, accuracy, collate

HERE = os.path.dirname(os.path.abspath(__file__))
JSON_ANSWER = len('"date":"YYYY-MM-DD"}') + 1  # what follows the given brace, and EOS
AFTER = 7001  # the lines of train.py's last stage


def unpacked(codes, scale):
    """The matrix of which packed codes and their scale are the rounded form (`export.packed`)."""
    quarters = [((codes >> (2 * i)) & 3).to(torch.float32) - 1 for i in range(4)]
    ternary = torch.cat(quarters)
    return ternary * (scale.float() / ternary.abs().mean())


def load(folder):
    """The model of a checkpoint, or in a folder that export.py wrote, with weights to train."""
    model = Model(0)
    if folder.endswith(".pt"):
        model.load_state_dict(torch.load(folder)["model"])
        return model
    stored = load_file(os.path.join(folder, "model.safetensors"))
    state = {"p.embed_tokens": stored["model.embed_tokens.weight"].float(),
             "p.norm": stored["model.norm.weight"].float()}
    for layer in range(LAYERS):
        for name in NORMS:
            state["p." + f"{layer}.{name}".replace(".", "/")] = stored[f"model.layers.{layer}.{name}.weight"].float()
        for name in SHAPES:
            key = f"model.layers.{layer}.{name}.weight"
            state["p." + f"{layer}.{name}".replace(".", "/")] = unpacked(stored[key], stored[key + "_scale"])
    model.load_state_dict(state)
    return model


def collate_json(pairs):
    """Rows of JSON answers, the positions that predict what follows the brace, and what follows."""
    rows = [[BOS, *text.encode(), 10, *f'{{"date":"{date}"}}'.encode(), EOS] for text, date in pairs]
    length = max(map(len, rows)) - 1
    ids = torch.tensor([r[:-1] + [PAD] * (length + 1 - len(r)) for r in rows])
    at = torch.tensor([range(len(r) - 1 - JSON_ANSWER, len(r) - 1) for r in rows])
    return ids, at, torch.tensor([r[-JSON_ANSWER:] for r in rows])


@torch.no_grad()
def json_accuracy(model, pairs):
    """As `train.accuracy`, of JSON answers."""
    pairs = sorted(pairs, key=lambda p: len(p[0].encode()))
    good = 0
    for i in range(0, len(pairs), 100):
        ids, at, want = collate_json(pairs[i : i + 100])
        good += int((model(ids, at).argmax(-1) == want).all(-1).sum())
    return good / len(pairs)


def drawn(seed, size, pool=16):
    """Endless lists of lines of similar length, as `train.batches` draws them in its last stage."""
    lines, rng = Lines(seed), random.Random(seed)
    lines.stage(AFTER)
    while True:
        some = sorted((next(lines) for _ in range(size * pool)), key=lambda p: len(p[0].encode()))
        chunks = [some[i : i + size] for i in range(0, len(some), size)]
        rng.shuffle(chunks)
        yield from chunks


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--from", dest="folder", default=os.path.join(HERE, "model"))
    a.add_argument("--out", default="/tmp/dates-json", help="folder of the checkpoint")
    a.add_argument("--log", default=os.path.join(HERE, "train_json.log"))
    a.add_argument("--seed", type=int, default=11)
    a.add_argument("--steps", type=int, default=600)
    a.add_argument("--batch", type=int, default=64)
    a.add_argument("--lr", type=float, default=4e-4)
    a.add_argument("--threads", type=int, default=2)
    args = a.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    os.makedirs(args.out, exist_ok=True)

    model = load(args.folder)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    opt = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.0}, {"params": vectors, "weight_decay": 0.0}],
                            lr=args.lr, betas=(0.9, 0.99))
    fresh = Lines(2_000_000 + args.seed, "fresh")
    watch = [next(fresh) for _ in range(400)]
    log = open(args.log, "a", buffering=1)
    note = lambda **kv: log.write(json.dumps(kv) + "\n")
    note(args={k: v for k, v in vars(args).items() if k not in ("out", "log", "folder")}, torch=torch.__version__)
    note(step=0, accuracy=accuracy(model, watch), json_accuracy=json_accuracy(model, watch))
    source, began, total = drawn(9000 + args.seed, args.batch), time.time(), 0.0
    for step in range(1, args.steps + 1):
        rate = min(step / 50, 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * step / args.steps)))
        for group in opt.param_groups:
            group["lr"] = args.lr * rate
        ids, at, want = (collate_json if step % 2 else collate)(next(source))
        loss = F.cross_entropy(model(ids, at).flatten(0, 1), want.flatten())
        opt.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        total += loss.item()
        if step % 10 == 0:
            note(step=step, loss=round(total / 10, 5), lr=round(args.lr * rate, 6), seconds=round(time.time() - began, 1))
            total = 0.0
        if step % 100 == 0 or step == args.steps:
            note(step=step, accuracy=accuracy(model, watch), json_accuracy=json_accuracy(model, watch))
            torch.save({"model": model.state_dict(), "step": step}, os.path.join(args.out, "last.pt"))


if __name__ == "__main__":
    main()
