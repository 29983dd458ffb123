"""What users of other systems write, and what it is called here.

Invariant: each entry is a whole help line, and right wherever its word stands in a statement of its kind.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

_ZERO = "sharding of weights is `zero = 3`"
_SEQUENCE = "sequences are cut by `cp`, with `cp_kind = ulysses` or `ring`"
_ALL = "it follows from the axes: tp x cp x pp x dp"
_CALLED: dict[str, dict[str, tuple[str, ...]]] = {
    "layout": {
        "tp": ("tensor_parallel", "tensor_parallel_size", "tensor_model_parallel_size"),
        "pp": ("pipeline", "pipeline_parallel", "pipeline_parallel_size", "pipeline_model_parallel_size"),
        "dp": ("data_parallel", "data_parallel_size", "replicas"),
        "cp": ("context_parallel", "context_parallel_size"),
        "ep": ("expert_parallel", "expert_parallel_size", "expert_model_parallel_size"),
        "vpp": ("virtual_pipeline", "virtual_pipeline_model_parallel_size", "interleave"),
    },
    "cluster": {
        "devices_per_node": ("gpus", "num_gpus", "gpus_per_node", "n_gpus_per_node"),
        "memory": ("vram", "hbm"),
    },
    "generate": {
        "samples": ("n", "group", "num_return_sequences", "num_generations"),
        "max_tokens": ("max_new_tokens",),
        "turns": ("max_turns", "num_turns"),
    },
    "update": {"epochs": ("ppo_epochs", "num_epochs"), "clip_grad": ("max_grad_norm", "grad_clip")},
}
_LOSS = "a loss has it: `loss = clip(0.2) + 0.001 * kl(low_var)`"
_OTHER: dict[str, dict[str, str]] = {
    "layout": {
        **dict.fromkeys(("fsdp", "fsdp_size", "sharding", "shard"), _ZERO),
        **dict.fromkeys(("sp", "sequence_parallel", "ulysses", "ulysses_sequence_parallel_size"), _SEQUENCE),
        **dict.fromkeys(("world_size", "devices", "gpus"), _ALL),
    },
    "update": {
        **dict.fromkeys(
            ("lr", "learning_rate", "weight_decay", "warmup"), "the optimizer has it: `optimizer = adamw(lr = 1e-6)`"
        ),
        **dict.fromkeys(("kl_coef", "kl_loss_coef", "beta", "clip_ratio", "eps", "clip_range", "entropy_coef"), _LOSS),
    },
}
_MEANT = {
    statement: {w: f"it is called `{name}` here" for name, words in _CALLED.get(statement, {}).items() for w in words}
    | _OTHER.get(statement, {})
    for statement in {*_CALLED, *_OTHER}
}
# What the ratio's bounds of a loss term are called elsewhere.
_BOUND = ("eps", "epsilon", "clip_ratio", "clip_range", "eps_clip", "cliprange")
_GROUPS = ("group", "groups", "sample", "samples", "prompts")
_IN_FILE = re.compile(r"([A-Za-z_][\w/]*)(?:\.py)?[.:]([A-Za-z_]\w*)(?:\(\))?")


def attribute(statement: str, key: str) -> str:
    """Help for an attribute that the statement does not have; nothing where the word is none of other systems'."""
    return _MEANT.get(statement, {}).get(key, "")


def option(key: str, known: Collection[str]) -> str:
    """Help for a parameter that a call does not have."""
    return "did you mean `low`?" if key in _BOUND and "low" in known else ""


def data_file(target: str, folder: bool) -> str:
    """Return how to make a data file of a file of another kind, or of a folder; "" for an unknown kind."""
    if folder:
        return f"it is a folder: name one file in it, `{target.rstrip('/')}/NAME.parquet`"
    stem, _, kind = target.rpartition(".")
    if kind == "gz":
        return f"unpack it: `gunzip -k {target}`"
    if kind == "csv":
        return (
            f"convert it in Python: `from pyarrow import csv, parquet; "
            f'parquet.write_table(csv.read_csv("{target}"), "{stem}.parquet")`'
        )
    if kind == "json":
        lines = f'open("{stem}.jsonl", "w").writelines(json.dumps(row) + "\\n" for row in json.load(open("{target}")))'
        return f"write one object a line, in Python: `import json; {lines}`"
    return ""


def groups(word: str, above: str) -> str:
    """Help for a `per` that names the groups in place of the column, `above`, whose rows they are under."""
    return f"the rows of one `{above}` are `per = {above}`" if above and word in _GROUPS else ""


def called(text: str, functions: Mapping[str, object] | Collection[str]) -> str:
    """Help for what stands where a call or `"file.py:function"` belongs: a name, with its module or without."""
    name = text.removesuffix("()")
    if name in functions:
        return f"write `{name}()`"
    if text.endswith(".py"):
        return f'write `"{text}:NAME"`, with a name that stands there'
    found = _IN_FILE.fullmatch(text)
    return f'write `"{found[1]}.py:{found[2]}"`' if found else ""
