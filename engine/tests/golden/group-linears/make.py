"""Writes the files of this folder: two random models with a scale for each 256 inputs in their linears, and what llama.cpp
computes of them.

    pip install gguf==0.19.0 numpy==2.4.6 xllamacpp==2026.10.11549
    python make.py

The expected log-probabilities come from the same weights as F32, with F32 keys and values, because llama.cpp rounds
the activations of TQ2_0 to 8 bits.
"""

import json
import os

import gguf
import numpy
import xllamacpp
from gguf import GGMLQuantizationType as Type

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB, CONTEXT = 256, 2, 4, 2, 64, 512, 512, 512
LINEARS = {
    "attn_q": (HEADS * HEAD_DIM, HIDDEN),
    "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_output": (HIDDEN, HEADS * HEAD_DIM),
    "ffn_gate": (INTERMEDIATE, HIDDEN),
    "ffn_up": (INTERMEDIATE, HIDDEN),
    "ffn_down": (HIDDEN, INTERMEDIATE),
}


def ternary(random, rows, cols):
    trits = random.integers(-1, 2, (rows, cols)).astype(numpy.float32)
    trits[0, :256] = 0
    trits[1, :128] = 0
    scales = numpy.sqrt(1.5 / cols) * (0.5 + random.random((rows, cols // 256)))
    return trits * numpy.repeat(scales.astype(numpy.float16).astype(numpy.float32), 256, axis=1)


def q4_k(random, rows, cols):
    """Random blocks: a packing of Q4_K is not in the package, but its decoding is."""
    blocks = random.integers(0, 256, (rows, cols // 256, 144), dtype=numpy.uint8)
    scales = numpy.array([0.005, 0.035], dtype=numpy.float16)
    blocks[:, :, :4] = scales.view(numpy.uint8)
    return blocks.reshape(rows, -1)


def weights(architecture, random):
    def normal(*shape):
        return random.standard_normal(shape)

    is_minicpm = architecture == "minicpm"
    tensors = {
        "token_embd.weight": (normal(VOCAB, HIDDEN) * (0.08 if is_minicpm else 1)).astype(numpy.float16),
        "output.weight": (normal(VOCAB, HIDDEN) * (0.35 if is_minicpm else 0.09)).astype(numpy.float16),
        "output_norm.weight": (1 + 0.2 * normal(HIDDEN)).astype(numpy.float32),
    }
    if not is_minicpm:
        tensors["token_embd.weight"] = q4_k(random, VOCAB, HIDDEN)
    for layer in range(LAYERS):
        for name, (rows, cols) in LINEARS.items():
            tensors[f"blk.{layer}.{name}.weight"] = ternary(random, rows, cols)
            if not is_minicpm:
                tensors[f"blk.{layer}.{name}.bias"] = (0.3 * normal(rows)).astype(numpy.float32)
        for name in ("attn_norm", "ffn_norm"):
            tensors[f"blk.{layer}.{name}.weight"] = (1 + 0.2 * normal(HIDDEN)).astype(numpy.float32)
    if is_minicpm:
        tensors["rope_factors_short.weight"] = numpy.linspace(1, 4, HEAD_DIM // 2).astype(numpy.float32)
        tensors["rope_factors_long.weight"] = numpy.linspace(2, 9, HEAD_DIM // 2).astype(numpy.float32)
    return tensors


def byte_tokens():
    """The alphabet of byte-level vocabularies, by byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    return [characters[byte] for byte in range(256)]


def write(path, architecture, tensors, linear_type):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    if architecture == "minicpm":
        writer.add_embedding_scale(12.0)
        writer.add_residual_scale(1.4 / LAYERS**0.5)
        writer.add_logit_scale(HIDDEN / 64)
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
        writer.add_rope_scaling_orig_ctx_len(CONTEXT)
    tokens = byte_tokens() + ["\u0120\u0120"] + [f"<t{id}>" for id in range(257, VOCAB)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 257 + [3] * (VOCAB - 257))
    writer.add_token_merges(["\u0120 \u0120"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    writer.add_add_bos_token(False)
    for name, values in tensors.items():
        is_linear = name.startswith("blk.") and values.ndim == 2
        if values.dtype == numpy.uint8 and linear_type is None:
            writer.add_tensor(name, gguf.quants.dequantize(values, Type.Q4_K))
        elif values.dtype == numpy.uint8:
            writer.add_tensor(name, values, raw_dtype=Type.Q4_K)
        elif is_linear and linear_type is not None:
            writer.add_tensor(name, gguf.quants.quantize(values, linear_type), raw_dtype=linear_type)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def log_probabilities(path, prompts):
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx, params.n_parallel, params.warmup = CONTEXT, 1, False
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server = xllamacpp.Server(params)
    for prompt in prompts:
        request = {"prompt": prompt, "n_predict": 1, "temperature": 0, "n_probs": VOCAB, "cache_prompt": False}
        answer = server.handle_completions(request)
        answer = json.loads(answer) if isinstance(answer, (str, bytes)) else answer
        values = {token["id"]: token["logprob"] for token in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]}
        yield [round(values[id], 6) for id in range(VOCAB)]


def main():
    cases = {}
    for seed, architecture in enumerate(("minicpm", "llama")):
        random = numpy.random.default_rng(seed + 12)
        tensors = weights(architecture, random)
        write(f"{architecture}-tq2_0.gguf", architecture, tensors, Type.TQ2_0)
        if architecture == "minicpm":
            write(f"{architecture}-tq1_0.gguf", architecture, tensors, Type.TQ1_0)
        write("f32.gguf", architecture, tensors, None)
        prompts = [random.integers(0, 256, count).tolist() for count in (1, 7, 31, 130)]
        outputs = log_probabilities("f32.gguf", prompts)
        cases[architecture] = [{"ids": ids, "log_probabilities": output} for ids, output in zip(prompts, outputs)]
    os.remove("f32.gguf")
    with open("cases.json", "w") as file:
        json.dump(cases, file)


main()
