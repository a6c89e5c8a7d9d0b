"""Exact match of the exported files, in NumPy and nothing else: an independent reading of the
format and of the forward pass, float32 activations, greedy decoding until EOS.

    python3 evaluate.py                 eval.jsonl
    python3 evaluate.py --fresh 2000    2,000 lines of the training distribution, none trained on
    python3 evaluate.py --text "Rechnung 82 vom 5. Okt. 98"
    python3 evaluate.py --files         tokenizer.json and the chat template (needs tokenizers, jinja2)
"""

import argparse
import json
import os
import time

import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))


def read_safetensors(path):
    raw = open(path, "rb").read()
    n = int.from_bytes(raw[:8], "little")
    header, body = json.loads(raw[8 : 8 + n]), raw[8 + n :]
    out = {}
    for name, e in header.items():
        if name == "__metadata__":
            continue
        chunk = body[e["data_offsets"][0] : e["data_offsets"][1]]
        if e["dtype"] == "BF16":
            array = (np.frombuffer(chunk, "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            assert e["dtype"] == "U8"
            array = np.frombuffer(chunk, np.uint8)
        out[name] = array.reshape(e["shape"])
    return out


class Model:
    def __init__(self, folder):
        self.c = c = json.load(open(os.path.join(folder, "config.json")))
        q = c["quantization_config"]
        assert (q["quant_method"], q["linear_class"], q["quantization_mode"]) == ("bitnet", "autobitlinear", "offline")
        assert c["hidden_act"] == "relu2" and c["tie_word_embeddings"]
        self.t = read_safetensors(os.path.join(folder, "model.safetensors"))
        for name in [n for n, a in self.t.items() if a.dtype == np.uint8]:
            codes = np.concatenate([(self.t[name] >> (2 * i)) & 3 for i in range(4)])
            assert codes.max() <= 2
            self.t[name] = codes.astype(np.float32) - 1

    def norm(self, x, name):
        return self.t[name] * (x / np.sqrt(np.mean(x * x, -1, keepdims=True) + np.float32(self.c["rms_norm_eps"])))

    def linear(self, x, name):
        s = np.float32(127) / np.maximum(np.abs(x).max(-1, keepdims=True), np.float32(1e-5))
        q = np.clip(np.rint(x * s), -128, 127)  # small integers: exact as float32, and so are the sums
        return (q @ self.t[name + ".weight"].T) / s * self.t[name + ".weight_scale"]

    def step(self, ids, past):
        """Logits after the last of `ids` [B, T], which follow the keys and values in `past`."""
        c = self.c
        heads, kv = c["num_attention_heads"], c["num_key_value_heads"]
        dim = c["hidden_size"] // heads
        b, t = ids.shape
        start = past[0][0].shape[2] if past else 0
        x = self.t["model.embed_tokens.weight"][ids]
        inv = np.float32(c["rope_theta"]) ** (-np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim))
        angle = np.arange(start, start + t, dtype=np.float32)[:, None] * inv
        cos, sin = np.cos(angle), np.sin(angle)

        def turn(a):
            lo, hi = a[..., : dim // 2], a[..., dim // 2 :]
            return np.concatenate([lo * cos - hi * sin, hi * cos + lo * sin], -1)

        hidden = np.arange(start + t)[None, :] > np.arange(start, start + t)[:, None]
        now = []
        for layer in range(c["num_hidden_layers"]):
            p = f"model.layers.{layer}."
            h = self.norm(x, p + "input_layernorm.weight")
            q, k, v = (self.linear(h, p + f"self_attn.{w}_proj").reshape(b, t, n, dim).transpose(0, 2, 1, 3)
                       for w, n in (("q", heads), ("k", kv), ("v", kv)))
            q, k = turn(q), turn(k)
            if past:
                k, v = np.concatenate([past[layer][0], k], 2), np.concatenate([past[layer][1], v], 2)
            now.append((k, v))
            k, v = np.repeat(k, heads // kv, 1), np.repeat(v, heads // kv, 1)
            score = q @ k.transpose(0, 1, 3, 2) / np.float32(np.sqrt(dim))
            score = np.where(hidden, np.float32(-np.inf), score)
            score = np.exp(score - score.max(-1, keepdims=True))
            o = (score / score.sum(-1, keepdims=True)) @ v
            h = self.norm(o.transpose(0, 2, 1, 3).reshape(b, t, heads * dim), p + "self_attn.attn_sub_norm.weight")
            x = x + self.linear(h, p + "self_attn.o_proj")
            h = self.norm(x, p + "post_attention_layernorm.weight")
            gate = np.maximum(self.linear(h, p + "mlp.gate_proj"), 0)
            h = self.norm(gate * gate * self.linear(h, p + "mlp.up_proj"), p + "mlp.ffn_sub_norm.weight")
            x = x + self.linear(h, p + "mlp.down_proj")
        assert x.dtype == np.float32
        return self.norm(x[:, -1], "model.norm.weight") @ self.t["model.embed_tokens.weight"].T, now

    def greedy(self, texts, limit=16):
        """The answers to lines of the same length in bytes."""
        ids = np.array([[self.c["bos_token_id"], *text.encode(), 10] for text in texts])
        past, out = None, []
        for _ in range(limit):
            logits, past = self.step(ids, past)
            ids = logits.argmax(-1)[:, None]
            out.append(ids[:, 0])
            if (np.array(out) == self.c["eos_token_id"]).any(0).all():
                break
        answers = []
        for row in np.array(out).T.tolist():
            row = row[: row.index(self.c["eos_token_id"])] if self.c["eos_token_id"] in row else row
            answers.append(bytes(i for i in row if i < 256).decode(errors="replace"))
        return answers


def exact_match(model, pairs, show=20):
    groups = {}
    for text, date in pairs:
        groups.setdefault(len(text.encode()), []).append((text, date))
    wrong = []
    for group in groups.values():
        for (text, date), answer in zip(group, model.greedy([t for t, _ in group])):
            if answer != date:
                wrong.append((text, date, answer))
    for text, date, answer in wrong[:show]:
        print(f"  wrong: {text!r}: {answer}, should be {date}")
    print(f"{len(pairs) - len(wrong)} of {len(pairs)} right = {100 * (1 - len(wrong) / len(pairs)):.2f} %")


def check_files(folder, texts):
    import jinja2
    from tokenizers import Tokenizer
    tok = Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))
    conf = json.load(open(os.path.join(folder, "tokenizer_config.json")))
    rng = np.random.default_rng(0)
    texts = texts + ["", " ", "\n", "\x00\x7f", "日本語 🙂\r\n\t  x", "".join(map(chr, range(1, 0x2000)))]
    texts += ["".join(map(chr, rng.integers(1, 0xD7FF, 50))) for _ in range(200)]
    for text in texts:
        raw = list(text.encode())
        assert tok.encode(text).ids == [256] + raw, text
        assert tok.encode(text, add_special_tokens=False).ids == raw, text
        assert tok.decode([256] + raw + [257], skip_special_tokens=True) == text, text
    template = jinja2.Environment().from_string(conf["chat_template"])
    render = lambda messages, ask=True: template.render(
        messages=messages, add_generation_prompt=ask, bos_token=conf["bos_token"], eos_token=conf["eos_token"])
    u = lambda s: {"role": "user", "content": s}
    s, r = {"role": "system", "content": "be brief"}, {"role": "assistant", "content": "2024-03-03"}
    assert render([u(" a 3.3.24 ")]) == "<|bos|>a 3.3.24\n"
    assert render([s, u("x"), r, u("y")]) == "<|bos|>y\n"
    assert render([u("x"), r], False) == "<|bos|>x\n2024-03-03<|eos|>"
    text = "Rechnung 82 vom 5. März 98"
    assert tok.encode(render([u(text)]), add_special_tokens=False).ids == [256, *text.encode(), 10]
    print(f"tokenizer.json: {len(texts)} texts encode to BOS + bytes and decode back; chat template as expected")


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--dir", default=HERE)
    a.add_argument("--fresh", type=int)
    a.add_argument("--text")
    a.add_argument("--files", action="store_true")
    args = a.parse_args()
    folder = os.path.join(args.dir, "model")
    held = [json.loads(line) for line in open(os.path.join(args.dir, "eval.jsonl"))]
    if args.files:
        return check_files(folder, [h["text"] for h in held])
    model = Model(folder)
    began = time.time()
    if args.text is not None:
        return print(model.greedy([args.text])[0])
    if args.fresh:
        from data import Lines
        lines = Lines(4_000_001, "fresh")
        exact_match(model, [next(lines) for _ in range(args.fresh)])
    else:
        exact_match(model, [(h["text"], h["date"]) for h in held])
    print(f"{time.time() - began:.0f} s")


if __name__ == "__main__":
    main()
