"""Writes a checkpoint of train.py as a Hugging Face packed `bitnet` folder, and the held-out lines.

    python3 export.py /tmp/dates/last.pt         writes model/ and eval.jsonl beside this file
"""

import argparse
import json
import os
import struct

import torch

from data import Lines
from train import BOS, EOS, FFN, HEADS, HIDDEN, KV, LAYERS, NORMS, PAD, SHAPES, THETA, VOCAB, EPS

HERE = os.path.dirname(os.path.abspath(__file__))
EVAL_SEED, EVAL_LINES = 3_000_001, 1000
SPECIAL = {BOS: "<|bos|>", EOS: "<|eos|>", PAD: "<|pad|>"}

# The last message of the user, as it is, between BOS and a newline. A date that the assistant
# gave already is kept only when no new answer is asked for.
CHAT_TEMPLATE = (
    "{% set ns = namespace(text='', answer='') %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}"
    "{% set ns.text = message['content'] | trim %}{% set ns.answer = '' %}"
    "{% elif message['role'] == 'assistant' %}"
    "{% set ns.answer = message['content'] | trim %}"
    "{% endif %}{% endfor %}"
    "{{ bos_token + ns.text + '\n' }}"
    "{% if ns.answer and not add_generation_prompt %}{{ ns.answer + eos_token }}{% endif %}"
)


def bf16(t):
    return "BF16", list(t.shape), t.to(torch.bfloat16).view(torch.int16).numpy().tobytes()


def packed(w):
    """The ternary matrix of `w`, four quarters of its rows to a byte, and its scale."""
    m = w.abs().mean().clamp(min=1e-5)
    t = (w / m).round().clamp(-1, 1).to(torch.int32) + 1
    quarter = w.shape[0] // 4
    codes = sum(t[i * quarter : (i + 1) * quarter] << (2 * i) for i in range(4)).to(torch.uint8)
    return ("U8", list(codes.shape), codes.numpy().tobytes()), bf16(m.view(1))


def tensors(state):
    get = lambda *name: state["p." + "/".join(".".join(name).split("."))]
    out = {"model.embed_tokens.weight": bf16(state["p.embed_tokens"]), "model.norm.weight": bf16(state["p.norm"])}
    for layer in range(LAYERS):
        for name in NORMS:
            out[f"model.layers.{layer}.{name}.weight"] = bf16(get(str(layer), name))
        for name in SHAPES:
            key = f"model.layers.{layer}.{name}.weight"
            out[key], out[key + "_scale"] = packed(get(str(layer), name))
    return out


def write_safetensors(path, entries):
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, (dtype, shape, raw) in sorted(entries.items()):
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + data)


def byte_symbols():
    """The byte-level alphabet of GPT-2: printable bytes stand for themselves, the others are
    moved to U+0100 and up, in order."""
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = iter(range(256, 512))
    return [chr(b) if b in keep else chr(next(moved)) for b in range(256)]


def special_token(name):
    return {"content": name, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
            "special": True}


def tokenizer():
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    bos = {"SpecialToken": {"id": SPECIAL[BOS], "type_id": 0}}
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": i, **special_token(s)} for i, s in SPECIAL.items()],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [bos, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {SPECIAL[BOS]: {"id": SPECIAL[BOS], "ids": [BOS], "tokens": [SPECIAL[BOS]]}},
        },
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {symbol: b for b, symbol in enumerate(byte_symbols())}, "merges": [],
        },
    }


CONFIG = {
    "architectures": ["BitNetForCausalLM"], "model_type": "bitnet", "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD, "hidden_act": "relu2", "hidden_size": HIDDEN,
    "initializer_range": 0.02, "intermediate_size": FFN, "max_position_embeddings": 512,
    "num_attention_heads": HEADS, "num_hidden_layers": LAYERS, "num_key_value_heads": KV, "rms_norm_eps": EPS,
    "rope_scaling": None, "rope_theta": THETA, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "use_cache": True, "vocab_size": VOCAB,
    "quantization_config": {"quant_method": "bitnet", "linear_class": "autobitlinear",
                            "quantization_mode": "offline"},
}
GENERATION = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD, "do_sample": False, "max_new_tokens": 12}
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIAL[BOS], "eos_token": SPECIAL[EOS],
    "pad_token": SPECIAL[PAD], "clean_up_tokenization_spaces": False, "model_max_length": 512,
    "model_input_names": ["input_ids", "attention_mask"],
    "added_tokens_decoder": {str(i): special_token(s) for i, s in SPECIAL.items()},
    "chat_template": CHAT_TEMPLATE,
}


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("checkpoint")
    a.add_argument("--to", default=HERE)
    args = a.parse_args()
    folder = os.path.join(args.to, "model")
    os.makedirs(folder, exist_ok=True)
    state = torch.load(args.checkpoint, map_location="cpu")
    write_safetensors(os.path.join(folder, "model.safetensors"), tensors(state["model"]))
    for name, value in (("config.json", CONFIG), ("generation_config.json", GENERATION),
                        ("tokenizer.json", tokenizer()), ("tokenizer_config.json", TOKENIZER_CONFIG)):
        with open(os.path.join(folder, name), "w") as f:
            json.dump(value, f, indent=1 if name == "tokenizer.json" else 2, ensure_ascii=False)
            f.write("\n")
    held = {}
    lines = Lines(EVAL_SEED, "eval")
    while len(held) < EVAL_LINES:
        text, date = next(lines)
        held.setdefault(text, date)
    with open(os.path.join(args.to, "eval.jsonl"), "w") as f:
        for text, date in held.items():
            f.write(json.dumps({"text": text, "date": date}, ensure_ascii=False) + "\n")
    print("exported step", state["step"], "to", folder)


if __name__ == "__main__":
    main()
