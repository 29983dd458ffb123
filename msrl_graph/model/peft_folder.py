"""Folders of adapters, as the library PEFT writes them.

A folder has the settings of an adapter, `adapter_config.json`, and its matrices. The names of the matrices are those of
lora.py, behind `base_model.model.`.

Invariant: a folder is read only if the adapter computes here what it computes in PEFT. A setting that nothing here
supports is an error with its name, also a setting of a later version of PEFT, unless it has a neutral value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..diagnostics import Diagnostic, Fault, Span
from ..files.paths import is_file
from ..files.weight_headers import UnreadableFile, read_header
from .architecture import HEAD, Model
from .lora import ALL_LINEAR, is_projection, list_projections, name_module
from .lora_settings import Lora
from .quantization import FolderWeight, find_weights

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
BASE = "base_model_name_or_path"
BEHIND = "base_model.model."  # before the names of weights
MERGE = "name a folder with merged weights: `model.merge_and_unload().save_pretrained(folder)` of PEFT writes one"
_READ = {BASE, "peft_type", "r", "lora_alpha", "lora_dropout", "target_modules"}
# Settings that do not change what a trained adapter computes, or only together with another setting.
_WITHOUT_EFFECT = {
    "auto_mapping",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "inference_mode",
    "layers_pattern",
    "loftq_config",
    "lora_ga_config",
    "megatron_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
}
# Values other than nothing, false and 0 that change nothing. Other first values of A and B also change the base.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "orthogonal", "eva"),
}
_HEADS = {"score", "classifier"}  # PEFT lists both for a model that scores


def is_adapter_folder(folder: Path) -> bool:
    """Return whether a folder has an adapter, and not the weights of a model."""
    return is_file(folder / CONFIG)


def find_files(folder: Path | str) -> list[Path]:
    """List the file that has the weights of an adapter, if there is one."""
    return [file for name in WEIGHTS if is_file(file := Path(folder) / name)][:1]


def read_weights(folder: Path | str) -> dict[str, FolderWeight]:
    """Return the weights of an adapter, by their names in a model's files.

    Raises UnreadableFile.
    """
    stored = {}
    for file in find_files(folder):
        try:
            stored = read_header(file)
        except (OSError, ValueError, RecursionError) as error:
            raise UnreadableFile(file, error) from error
    return {name.removeprefix(BEHIND): weight for name, weight in find_weights(stored, None).items()}


def make_config(model: Model) -> dict[str, Any]:
    """Return the adapter_config.json of a model's adapter."""
    lora = model.lora
    assert lora is not None
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if model.scores else "CAUSAL_LM",
        BASE: model.path,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": [*lora.targets],
        "modules_to_save": [HEAD.removesuffix(".weight")] if model.scores else None,
        "bias": "none",
        "inference_mode": True,
    }


def find_adapter(config: Mapping[str, Any], model: Model, name: str, path: str, span: Span) -> Lora:
    """Return the adapter that an adapter_config.json describes.

    `model` is the model that the adapter belongs to, `name` the folder's name in messages, and `path` the folder.
    Raises Fault with the code not-yet for a setting that nothing here supports, and unknown-model for a wrong value.
    """
    if odd := _find_unsupported(config):
        message = f"the adapter `{name}` has `{odd} = {json.dumps(config[odd])}`, which can be neither planned nor run"
        raise Fault(Diagnostic("not-yet", message, span, MERGE))
    for key, kinds in (("r", int), ("lora_alpha", int | float), ("lora_dropout", int | float)):
        value = config.get(key, 0)
        least = 0 if key == "lora_dropout" else 1e-9
        if not isinstance(value, kinds) or isinstance(value, bool) or value < least:
            message = f"`{name}/{CONFIG}` has `{key} = {json.dumps(config.get(key))}`"
            raise Fault(Diagnostic("unknown-model", message, span, "let PEFT write the folder again"))
    targets = _find_targets(config.get("target_modules"), model, name, span)
    return Lora(config["r"], float(config["lora_alpha"]), targets, float(config.get("lora_dropout", 0)), folder=path)


def _find_unsupported(config: Mapping[str, Any]) -> str:
    """Return the name of a setting that nothing here supports; "" if there is none."""
    if config.get("peft_type") != "LORA" and "peft_type" in config:
        return "peft_type"
    for key, value in config.items():
        if key in _READ | _WITHOUT_EFFECT or not value or value in _NEUTRAL.get(key, ()):
            continue
        if key == "modules_to_save" and isinstance(value, list) and {*map(str, value)} <= _HEADS:
            continue
        return key
    return ""


def _find_targets(stated: Any, model: Model, name: str, span: Span) -> tuple[str, ...]:
    """Return the projections that `target_modules` chooses, as in PEFT.

    It has ends of names of modules, or a pattern that matches whole names.
    """
    if stated == "all-linear":
        return (ALL_LINEAR,)
    projections: dict[str, list[str]] = {target: [] for target in list_projections(model)}
    others = []  # modules with a matrix, which have no adapter
    for tensor in model.weights:
        module = name_module(tensor)
        if is_projection(tensor):
            projections[module.rpartition(".")[2]].append(module)
        elif len(tensor.shape) > 1 and tensor.name.endswith(".weight"):
            others.append(module)
    words = [stated] if isinstance(stated, str) else stated if isinstance(stated, list) else []
    try:
        patterns = [re.compile(word if word is stated else rf"(?:.*\.)?{re.escape(str(word))}") for word in words]
    except re.error:
        patterns = []
    has = f"the adapter `{name}` has `target_modules = {json.dumps(stated)}`"

    def is_chosen(module: str) -> bool:
        return any(pattern.fullmatch(module) for pattern in patterns)

    if other := next(filter(is_chosen, others), ""):
        message = f"{has}, but `{other}` can have no adapter"
        raise Fault(Diagnostic("not-yet", message, span, MERGE))
    chosen = {target: [*filter(is_chosen, modules)] for target, modules in projections.items()}
    for target, modules in chosen.items():
        if modules and len(modules) < len(projections[target]):
            left = next(module for module in projections[target] if module not in modules)
            message = f"{has}, which does not choose `{left}`: an adapter of some layers can be neither planned nor run"
            raise Fault(Diagnostic("not-yet", message, span, MERGE))
    if not any(chosen.values()):
        known = ", ".join(f"`{target}`" for target in projections)
        message = f"{has}, which chooses no projection of `{model.name}`"
        raise Fault(Diagnostic("unknown-model", message, span, f"known here: {known}"))
    return tuple(target for target, modules in chosen.items() if modules)
