"""Converts folders to GGUF with this repository's command, and compares what llama.cpp makes of the files: tokens of texts,
and log-probabilities.

    pip install gguf==0.19.0 numpy==2.4.6 xllamacpp==2026.10.11549
    python witness.py path/to/tritmill

The folders are random: MiniCPM with LongRoPE and a BPE vocabulary of SentencePiece, Llama with biases and a Unigram one.
llama.cpp computes from the weights of the converted file as F32, because it rounds the activations of TQ2_0 to 8 bits.
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import urllib.request

import gguf
import numpy
import xllamacpp

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB, CONTEXT = 256, 2, 4, 2, 64, 512, 720, 512
DATA = pathlib.Path(__file__).parents[2] / "data"
LINEARS = {
    "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
}
CASES = [("minicpm", "spm-bpe-bytes"), ("llama", "spm-unigram-rules")]


def weights(is_minicpm, random):
    tensors = {
        "model.embed_tokens.weight": random.standard_normal((VOCAB, HIDDEN)) * (0.08 if is_minicpm else 1),
        "lm_head.weight": random.standard_normal((VOCAB, HIDDEN)) * (0.35 if is_minicpm else 0.09),
        "model.norm.weight": 1 + 0.2 * random.standard_normal(HIDDEN),
    }
    for layer in range(LAYERS):
        for name, (rows, cols) in LINEARS.items():
            trits = random.integers(-1, 2, (rows, cols))
            scales = numpy.sqrt(1.5 / cols) * (0.5 + random.random((rows, cols // 256)))
            tensors[f"model.layers.{layer}.{name}.weight"] = trits * numpy.repeat(scales.astype(numpy.float16), 256, axis=1)
            if not is_minicpm:
                tensors[f"model.layers.{layer}.{name}.bias"] = 0.3 * random.standard_normal(rows)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = 1 + 0.2 * random.standard_normal(HIDDEN)
    return {name: values.astype(numpy.float16) for name, values in tensors.items()}


def write_folder(folder, architecture, vocabulary, random):
    is_minicpm = architecture == "minicpm"
    header, data = {}, b""
    for name, values in weights(is_minicpm, random).items():
        bytes_ = values.tobytes()
        header[name] = {"dtype": "F16", "shape": values.shape, "data_offsets": [len(data), len(data) + len(bytes_)]}
        data += bytes_
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    config = {
        "model_type": architecture, "hidden_act": "silu", "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "vocab_size": VOCAB,
        "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "bos_token_id": 1, "eos_token_id": 2,
    }
    if is_minicpm:
        config |= {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 64, "rope_scaling": {
            "rope_type": "longrope", "original_max_position_embeddings": CONTEXT,
            "short_factor": numpy.linspace(1, 4, HEAD_DIM // 2).tolist(),
            "long_factor": numpy.linspace(2, 9, HEAD_DIM // 2).tolist(),
        }}
    else:
        config |= {"attention_bias": True, "mlp_bias": True}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.model").write_bytes((DATA / f"{vocabulary}.model").read_bytes())
    (folder / "tokenizer_config.json").write_text("{}")


def widen(source, target, architecture):
    """Copies a GGUF file, with all tensors as F32."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, architecture)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        kinds = field.types
        writer.add_key_value(field.name, field.contents(), kinds[0], kinds[1] if len(kinds) > 1 else None)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, numpy.ascontiguousarray(values, dtype=numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def serve(path):
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.warmup = CONTEXT, 1, False
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    return xllamacpp.Server(params)


def tokens(server, text, around=False):
    body = json.dumps({"content": text, "add_special": around, "parse_special": True}).encode()
    request = urllib.request.Request(f"{server.listening_address}/tokenize", body, {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request))["tokens"]


def log_probabilities(server, prompt):
    request = {"prompt": prompt, "n_predict": 1, "temperature": 0, "n_probs": VOCAB, "cache_prompt": False}
    answer = server.handle_completions(request)
    answer = json.loads(answer) if isinstance(answer, (str, bytes)) else answer
    top = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    values = {token["id"]: token["logprob"] for token in top}
    return numpy.array([values.get(id, numpy.nan) for id in range(VOCAB)])


def ours(tritmill, path, prompt, folder):
    file = folder / "logits.f32"
    text = ",".join(map(str, prompt))
    subprocess.run([tritmill, "model", "logits", "--model", path, "--tokens", text, "--kv", "f32", "-o", file],
                   check=True, stdout=subprocess.DEVNULL)
    logits = numpy.fromfile(file, numpy.float32).reshape(len(prompt), VOCAB)[-1].astype(numpy.float64)
    logits -= logits.max()
    return logits - numpy.log(numpy.exp(logits).sum())


def check(tritmill, architecture, vocabulary, random, folder):
    write_folder(folder, architecture, vocabulary, random)
    converted, wide = folder / "converted.gguf", folder / "wide.gguf"
    subprocess.run([tritmill, "model", "convert", "--model", folder, "--to", "gguf-tq2_0", "-o", converted], check=True)
    server = serve(converted)
    recorded = json.loads((DATA / f"{vocabulary}.json").read_text())
    cases = [(case["text"], case["ids"]) for case in recorded["cases"]]
    cases += [(case["text"], case["legacy"]) for case in recorded["parts"]]
    wrong = [(text, ids, tokens(server, text)) for text, ids in cases if tokens(server, text) != ids]
    print(f"{architecture}, {vocabulary}: {len(cases) - len(wrong)} of {len(cases)} texts have the tokens of SentencePiece")
    assert tokens(server, "", around=True) == [1], "BOS, as in tokenizer_config.json"
    for text, want, got in wrong:
        print(f"  {text!r}: {got} instead of {want}")
    rounded = {length: log_probabilities(server, prompt) for length, prompt in prompts()}
    widen(converted, wide, architecture)
    server = serve(wide)
    for length, prompt in prompts():
        theirs, got = log_probabilities(server, prompt), ours(tritmill, folder, prompt, folder)
        relative = lambda a, b: numpy.sqrt(numpy.nanmean((a - b) ** 2)) / numpy.nanstd(b)
        print(f"  {length} tokens: relative RMS {relative(got, theirs):.1e} (with 8-bit activations "
              f"{relative(rounded[length], theirs):.1e}), same first {numpy.nanargmax(theirs) == got.argmax()}")


def prompts():
    random = numpy.random.default_rng(3)
    return [(length, random.integers(3, 350, length).tolist()) for length in (1, 7, 31, 130)]


def main():
    for seed, (architecture, vocabulary) in enumerate(CASES):
        with tempfile.TemporaryDirectory() as folder:
            check(sys.argv[1], architecture, vocabulary, numpy.random.default_rng(seed), pathlib.Path(folder))


main()
