"""Makes the model that the clients ask: a tiny Qwen3 with random weights, a template that renders tools, and
a context long enough for the prompts of agents.

    python make_model.py engine/tests/golden/qwen3-group-tiny FOLDER
"""

import json
import pathlib
import shutil
import sys

CONTEXT = 8192
golden, folder = map(pathlib.Path, sys.argv[1:])
folder.mkdir(parents=True, exist_ok=True)
for file in [*golden.glob("model*"), golden / "tokenizer.json"]:
    shutil.copy(file, folder)
config = json.loads((golden / "config.json").read_text())
(folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
tokenizer = json.loads((golden / "tokenizer_config.json").read_text())
tokenizer["model_max_length"] = CONTEXT
tokenizer["chat_template"] = pathlib.Path(__file__).with_name("chat_template.jinja").read_text()
(folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
