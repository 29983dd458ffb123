"""A model's folder whose tokenizer has a chat template, and what is made of a small program and rows with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

import msrl_graph
from msrl_graph.ir.plan import Plan
from msrl_graph.runtime.data.dataset import Dataset
from msrl_graph.runtime.data.tokens import Tokens

EXAMPLE = Path(__file__).parents[2] / "examples" / "arithmetic" / "model"
SPECIAL = ("<|end|>", "<|start|>", "<|stop|>")
# As ChatML, with a newline after each turn, which is no part of a response.
TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == "nobody" %}{{ raise_exception("nobody speaks") }}{% endif -%}
{{ "<|start|>" + message.role + "\n" + message.content + "<|stop|>\n" }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ "<|start|>assistant\n" }}{% endif -%}
"""


def model(
    folder: Path,
    template: str = TEMPLATE,
    separate: bool = False,
    ends: Any = (0, 2),
    own: str = "<|stop|>",
    parts: int = 1,
) -> Path:
    """A model's folder; its template stands in a file of its own (`separate`), or in the tokenizer's config. So many
    `parts` divide its vocabulary."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(s, special=True, normalized=False) for s in SPECIAL]
    tokenizer.train_from_iterator(
        ["user assistant system what is one plus two three four"] * 4,
        trainers.BpeTrainer(
            vocab_size=320, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        ),
    )
    # What its author's batches were padded and cut to; nothing here may be.
    tokenizer.enable_padding(length=64)
    tokenizer.enable_truncation(4)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": own}
    if template and not separate:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if separate:
        (folder / "chat_template.jinja").write_text(template)
    words = -(-tokenizer.get_vocab_size() // parts) * parts
    shape = json.loads((EXAMPLE / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**shape, "max_position_embeddings": 4096, "vocab_size": words, "eos_token_id": 1})
    )
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends} if ends is not None else {}))
    held = load_file(EXAMPLE / "model.safetensors")
    rows = {name: words if "embed" in name or "lm_head" in name else len(tensor) for name, tensor in held.items()}
    save_file(
        {name: np.resize(tensor, (rows[name], *tensor.shape[1:])) for name, tensor in held.items()},
        folder / "model.safetensors",
    )
    return folder


def dataset(
    folder: Path, columns: dict[str, str], rows: list[dict[str, Any]], nodes: str, parquet: bool = False
) -> Dataset:
    """The rows as the source of `plan`."""
    path = folder / ("rows.parquet" if parquet else "rows.jsonl")
    if parquet:
        import pyarrow as pa
        from pyarrow import parquet as pq

        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    made = plan(folder, path, columns, nodes)
    return Dataset(made.deploy.data["source"], made, Tokens(str(folder / "model")).tokenizer)


def plan(folder: Path, path: Path, columns: dict[str, str], nodes: str) -> Plan:
    """A program with these columns, whose model is in `folder`/model; the source gives those that do not begin with
    `out`."""
    given = [name for name in columns if not name.startswith("out")]
    program = f"""
        algorithm a {{
          columns {{ {" ".join(f"{name} : {kind}" for name, kind in columns.items())} }}
          worker actor : policy
          worker judge : policy frozen
          worker host : function
          source(1) -> {", ".join(given)}
          {nodes}
        }}
        cluster one {{ device = "cpu" }}
        deploy a on one {{
          model policy = "{folder / "model"}"
          data source = "{path}"
        }}
    """
    return msrl_graph.compile(folder / "program.rlg", text=program)
