"""Tables of models and engines for the language reference.

Invariant: the tables have what the package itself provides, not what plug-ins provide.
"""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from ..backends import ENGINES, can_build
from ..hardware.device_kinds import Where
from ..ir.kinds import join_words
from ..model import models, preset_names, presets
from ..model.families import FAMILIES
from ..model.features import FEATURES


def models_table() -> str:
    """Return the table of the presets of models."""
    lines = ["| preset | family | parameters | layers | hidden | tokenizer |", "|---|---|---|---|---|---|"]
    for name in presets.PRESETS:
        model = models.load(name, Path())
        tokenizer = preset_names.find_tokenizer_name(name) or "its own"
        shape = f"{model.parameters / 1e9:.3g} B | {model.layers} | {model.hidden}"
        lines.append(f"| `{name}` | {model.family} | {shape} | {tokenizer} |")
    architectures = ", ".join(f"`{family.architecture}`" for family in FAMILIES.built_in.values())
    return "\n".join([*lines, "", f"A folder can have a model of these architectures: {architectures}."])


def engines_table() -> str:
    """Return the table of the built-in engines."""
    lines = [
        "| engine | verbs | shards along | zero | options | features of models that it only plans | runs here |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, engine in ENGINES.built_in.items():
        can = engine.capabilities
        zero = ", ".join(map(str, can.zero)) if "update" in engine.verbs else ""
        here = "yes" if can_build(name) else "no: planned and simulated"
        lacks = ", ".join(words for feature, words in FEATURES.items() if feature not in can.features)
        cells = (
            ", ".join(engine.verbs),
            join_words(can.axes, ", "),
            zero,
            join_words(can.options, ", "),
            lacks or "-",
            here,
        )
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    host, other = (
        join_words(tuple(spec.name for spec in ENGINES.built_in.values() if where in spec.capabilities.chosen), ", ")
        for where in get_args(Where)
    )
    return "\n".join(
        [
            *lines,
            "",
            "How `ep` and `etp` shard the experts of a layer:",
            "",
            *(f"- `{name}`: {spec.sharding.spread.words}." for name, spec in ENGINES.built_in.items()),
            "",
            (
                f"If the file names no engine, the planner chooses one: on CPUs among {host}, on "
                f"other devices among {other}; if "
                "none of these supports the model's family or the layout, among the others. If "
                "several fit, it takes the one with "
                "the fastest iteration."
            ),
        ]
    )
