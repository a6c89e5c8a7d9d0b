"""Writes the GGUF files of this folder with the PyPI package `gguf` (0.19.0), an encoder that is
independent of the reader under test, and `expected.json`, what they hold.

    pip install gguf==0.19.0 numpy && python make_gguf.py
"""

import hashlib
import json
import pathlib

import gguf
import numpy as np
from gguf import GGMLQuantizationType as T

HERE = pathlib.Path(__file__).parent
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB = 256, 4, 1, 64, 256, 260


def sha(array):
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def byte_alphabet():
    printable = [*range(33, 127), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def permute(rows, heads):
    """LlamaModel.permute of llama.cpp's convert_hf_to_gguf.py."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write(path, arch, ternary_type, dense_type, seed):
    rng = np.random.default_rng(seed)
    expected = {}
    out = gguf.GGUFWriter(path, arch)
    out.add_context_length(512)
    out.add_embedding_length(HIDDEN)
    out.add_block_count(1)
    out.add_feed_forward_length(INTERMEDIATE)
    out.add_head_count(HEADS)
    out.add_head_count_kv(KV_HEADS)
    out.add_rope_dimension_count(HEAD_DIM)
    out.add_rope_freq_base(10000.0)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_vocab_size(VOCAB)
    if arch == "bitnet":
        out.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        out.add_rope_scaling_factor(1.0)
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("llama-bpe")
    alphabet = byte_alphabet()
    out.add_token_list([alphabet[byte] for byte in range(256)] + ["<|begin_of_text|>", "<|eot_id|>", "<tag>", "[PAD259]"])
    out.add_token_types([1] * 256 + [3, 3, 4, 5])
    out.add_token_merges(["Ġ a"])
    out.add_bos_token_id(256)
    out.add_eos_token_id(257)

    def dense(name, shape):
        quantized = gguf.quants.quantize(rng.standard_normal(shape).astype(np.float32), dense_type)
        out.add_tensor(name, quantized, raw_dtype=dense_type)
        expected[name] = {"sha256_of_f32": sha(gguf.quants.dequantize(quantized, dense_type).astype("<f4"))}

    def norm(name, size):
        weights = rng.standard_normal(size).astype(np.float32)
        out.add_tensor(name, weights)
        expected[name] = {"sha256_of_f32": sha(weights)}

    def ternary(name, rows, cols, heads=None):
        trits = rng.integers(-1, 2, (rows, cols), dtype=np.int8)
        if "ffn_up" in name:
            trits[0] = 0  # a block of zeros
        scale = np.float32(np.float16(0.0123))
        stored = trits if heads is None else permute(trits, heads)
        quantized = gguf.quants.quantize(stored.astype(np.float32) * scale, ternary_type)
        out.add_tensor(name, quantized, raw_dtype=ternary_type)
        expected[name] = {"sha256_of_row_major_int8": sha(trits), "scale": float(scale)}

    dense("token_embd.weight", (VOCAB, HIDDEN))
    if arch == "llama":
        dense("output.weight", (VOCAB, HIDDEN))
    norm("output_norm.weight", HIDDEN)
    norm("blk.0.attn_norm.weight", HIDDEN)
    norm("blk.0.ffn_norm.weight", HIDDEN)
    if arch == "bitnet":
        norm("blk.0.attn_sub_norm.weight", HIDDEN)
        norm("blk.0.ffn_sub_norm.weight", INTERMEDIATE)
    permuted = arch == "llama"
    ternary("blk.0.attn_q.weight", HEADS * HEAD_DIM, HIDDEN, HEADS if permuted else None)
    ternary("blk.0.attn_k.weight", KV_HEADS * HEAD_DIM, HIDDEN, KV_HEADS if permuted else None)
    ternary("blk.0.attn_v.weight", KV_HEADS * HEAD_DIM, HIDDEN)
    ternary("blk.0.attn_output.weight", HIDDEN, HEADS * HEAD_DIM)
    ternary("blk.0.ffn_gate.weight", INTERMEDIATE, HIDDEN)
    ternary("blk.0.ffn_up.weight", INTERMEDIATE, HIDDEN)
    ternary("blk.0.ffn_down.weight", HIDDEN, INTERMEDIATE)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return expected


def golden_embedding(path):
    """The embedding of a golden file as the package dequantizes it (it cannot encode Q6_K)."""
    for tensor in gguf.GGUFReader(path).tensors:
        if tensor.name == "token_embd.weight":
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            return {"type": tensor.tensor_type.name, "sha256_of_f32": sha(values.astype("<f4"))}


expected = {
    "llama-tq2_0-q8_0.gguf": write(HERE / "llama-tq2_0-q8_0.gguf", "llama", T.TQ2_0, T.Q8_0, 1),
    "bitnet-tq1_0-bf16.gguf": write(HERE / "bitnet-tq1_0-bf16.gguf", "bitnet", T.TQ1_0, T.BF16, 2),
    "golden/synth-TQ1_0.gguf": golden_embedding(HERE.parent / "golden/gguf/synth-TQ1_0.gguf"),
}
(HERE / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
