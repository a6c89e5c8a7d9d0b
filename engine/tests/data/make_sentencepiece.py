"""Trains the SentencePiece models of this folder and records what the library makes of texts.

    pip install sentencepiece==0.2.3 protobuf transformers==5.24.0 && python make_sentencepiece.py

For each `NAME.model` there is `NAME.json`: its pieces, and for each text the ids and the text decoded from them.
Cases with `parts` are texts with special tokens: the parts between these are encoded on their own, with a space
before each (`legacy`) or only before a first part (`first`, by the same model without its dummy prefix).

`NAME.tokenizer.json` is the first model as transformers' Llama tokenizer writes it, `NAME.transformers.json` what that
tokenizer makes of the texts (it adds no space before a text that begins with one).

The corpus is this repository's own text at the time, so a new run gives other models, and all files change together.
"""

import json
import pathlib
import shutil
import tempfile

import sentencepiece
from sentencepiece import sentencepiece_model_pb2 as schema

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[2]

EXTRA = ["Größe und Übermut", "日本語のテキスト。日本", "naïve café résumé", "123 4567 890",
         "Привет мир, как дела", "fine fluff TM 1/2", "カタカナ ガギグ"]
TEXTS = [
    "", " ", "  ", "\n", "a", " a", "a ", "  a  b  ", "Hello world", "The scheduler's queue, the worker's lease.",
    "tokens per second: 1234567 and 3.14159", "tab\tand\nnewline\n\n  indented\r\n", "Größe, naïve café",
    "日本語のテキスト", "Привет мир", "emoji 😀👩‍👩‍👧 and 🇩🇪", "zero\u200bwidth and soft\u00adhyphen",
    "nbsp\u00a0and\u3000wide space", "ＦＵＬＬ ｗｉｄｔｈ １２３", "ｶﾞｷﾞ ｱ", "ﬁne ﬂuff ™ ½ ①", "e\u0301 combining a\u0308",
    "<0x41> and <0x0A>", "literal▁marks▁", "x" * 50, " " * 17 + "deep", "𝔘𝔫𝔦 ∑∫ ℝ", "\u0001 control",
    "https://example.com/a?b=c&d=%20", "fn main() {\n    println!(\"{}\", 1);\n}\n", "한국어 العربية ไทย",
    "ÀÉÎ ÀÉ", "trailing newline\n", "....!!!???", "aaaaaaa aa a aaa", "\ufeffmark", "🙂",
]
SPECIAL_TEXTS = [
    ["<s>", "Hello", "</s>"], ["a", "<|im_end|>", " b"], ["<s>", " two  spaces", "<|im_end|>", "\nnext", "</s>"],
    ["<|im_end|>", "<|im_end|>"], ["<unk>", "日本"],
]
# Source and target characters in hexadecimal: some rules of NFKC, so that the map is small.
RULES = {"ﬁ": "fi", "ﬂ": "fl", "™": "TM", "½": "1\u20442", "①": "1", "ｶ": "カ", "ｷ": "キ", "ｱ": "ア", "ｶﾞ": "ガ",
         "ｷﾞ": "ギ", "e\u0301": "é", "a\u0308": "ä", "\u200b": "", "\u00ad": "", "\u0001": "",
         "\ufeff": "", "\u00a0": " ", "\u3000": " ", "\n": " ", "\t": " ", "\r": " "}
RULES |= {chr(0xFEE0 + code): chr(code) for code in range(0x21, 0x7F)}

MODELS = {
    # As Llama's: identity, bytes, all spaces kept.
    "spm-bpe-bytes": dict(model_type="bpe", vocab_size=700, byte_fallback=True, normalization_rule_name="identity",
                          remove_extra_whitespaces=False, split_digits=True,
                          allow_whitespace_only_pieces=True, user_defined_symbols=["<|im_end|>"]),
    "spm-bpe-rules": dict(model_type="bpe", vocab_size=400, user_defined_symbols=["<|im_end|>"]),
    "spm-unigram-rules": dict(model_type="unigram", vocab_size=400, user_defined_symbols=["<|im_end|>"]),
    "spm-unigram-bytes": dict(model_type="unigram", vocab_size=700, byte_fallback=True, add_dummy_prefix=False,
                              remove_extra_whitespaces=False, user_defined_symbols=["<|im_end|>"]),
}


def corpus():
    lines = []
    for path in [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))[:4]]:
        lines += path.read_text().splitlines()
    return [line.strip() for line in lines if line.strip()] + EXTRA * 20


def rules_file():
    path = HERE / "rules.tsv"
    code = lambda text: " ".join(f"{ord(character):X}" for character in text)
    path.write_text("".join(f"{code(source)}\t{code(target)}\n" for source, target in RULES.items()))
    return path


def trim(model):
    """Leaves out what only the trainer and tools need."""
    model.DiscardUnknownFields()
    model.normalizer_spec.ClearField("normalization_rule_tsv")
    model.trainer_spec.ClearField("input")
    model.trainer_spec.ClearField("model_prefix")
    return model


def without_prefix(model):
    other = schema.ModelProto()
    other.CopyFrom(model)
    other.normalizer_spec.add_dummy_prefix = False
    return sentencepiece.SentencePieceProcessor(model_proto=other.SerializeToString())


def record(name, model):
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
    bare = without_prefix(model)
    special = {piece.piece: id for id, piece in enumerate(model.pieces) if piece.type in (2, 3, 4)}
    cases = []
    for text in TEXTS:
        ids = processor.encode(text)
        cases.append({"text": text, "ids": ids, "decoded": processor.decode(ids)})
    parts_cases = []
    for parts in SPECIAL_TEXTS:
        legacy, first = [], []
        for index, part in enumerate(parts):
            legacy += [special[part]] if part in special else processor.encode(part)
            first += [special[part]] if part in special else (processor if index == 0 else bare).encode(part)
        parts_cases.append({"text": "".join(parts), "legacy": legacy, "first": first})
    pieces = [[piece.piece, piece.score, piece.type] for piece in model.pieces]
    out = {"pieces": pieces, "cases": cases, "parts": parts_cases}
    (HERE / f"{name}.json").write_text(json.dumps(out, ensure_ascii=False, separators=(",", ":")) + "\n")


def record_transformers(name):
    from transformers import LlamaTokenizer

    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(HERE / f"{name}.model", pathlib.Path(folder) / "tokenizer.model")
        tokenizer = LlamaTokenizer.from_pretrained(folder)
        tokenizer.save_pretrained(folder)
        saved = json.loads((pathlib.Path(folder) / "tokenizer.json").read_text())
    (HERE / f"{name}.tokenizer.json").write_text(json.dumps(saved, ensure_ascii=False, separators=(",", ":")) + "\n")
    cases = []
    for text in TEXTS + ["".join(parts) for parts in SPECIAL_TEXTS]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        cases.append({"text": text, "ids": ids, "decoded": tokenizer.decode(ids)})
    out = json.dumps({"cases": cases}, ensure_ascii=False, separators=(",", ":"))
    (HERE / f"{name}.transformers.json").write_text(out + "\n")


def main():
    rules = rules_file()
    for name, options in MODELS.items():
        if "normalization_rule_name" not in options:
            options["normalization_rule_tsv"] = str(rules)
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(corpus()), model_prefix=str(HERE / name), character_coverage=0.9995,
            hard_vocab_limit=False, num_threads=1, minloglevel=2, **options)
        (HERE / f"{name}.vocab").unlink()
        path = HERE / f"{name}.model"
        model = trim(schema.ModelProto.FromString(path.read_bytes()))
        path.write_bytes(model.SerializeToString())
        record(name, model)
    rules.unlink()
    record_transformers("spm-bpe-bytes")


main()
