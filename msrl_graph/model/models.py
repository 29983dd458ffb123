"""Models: their tensors by name and shape, from a preset or a Hugging Face folder.

The presets are in presets.py.

Invariant: tensors are derived from an architecture, never read from weights. Their names are those in the safetensors
files. Their order is the order in the model: embedding, layers, norm, head.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ..diagnostics import NOWHERE, Diagnostic, Fault, Span
from ..files import fix_commands, urls
from ..files.paths import hub_name, is_file, is_folder
from ..sharding.tensors import Tensor
from . import peft_folder, preset_names, quantization
from .architecture import EMBEDDING, LOGITS, Model
from .families import FAMILIES, Family, find_family
from .features import FEATURES
from .fields import ConfigError, ModelConfig, count_positions, engine_fields, read_fields
from .layers import ExpertMlp, GroupedQueryAttention, Layer
from .presets import PRESETS
from .quantization import FolderWeight

# The type in which a model of a type is trained. float16 would need scaled losses; bfloat16 has the range of float32.
DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "bf16", "f32": "f32", "bf16": "bf16"}
# Files that are read from a folder at a URL before a run fetches all of it.
SHAPE = ("config.json", "tokenizer.json", peft_folder.CONFIG)
TEXT_PART = "model.language_model."  # how names of weights begin in a model that also reads images
# Fields of a config that stand next to its `text_config`.
SHARED = ("torch_dtype", "dtype", "quantization_config", "tie_word_embeddings")


def read_token_texts(path: str, special: bool = True) -> dict[int, str] | None:
    """Return the text of each token id, from the tokenizer.json of a model's folder.

    `special` says whether special tokens are included. Returns None if there is no readable tokenizer.json.
    """
    try:
        content = json.loads((Path(path) / "tokenizer.json").read_bytes())
        vocabulary = content["model"]["vocab"]
        pairs = (
            vocabulary.items()
            if isinstance(vocabulary, dict)
            else ((item[0], number) for number, item in enumerate(vocabulary))
        )
        added = content.get("added_tokens", ())
        texts = {number: text for text, number in pairs}
        texts |= {entry["id"]: entry["content"] for entry in added}
        for token in () if special else added:
            if token.get("special"):
                texts.pop(token["id"], None)
        return texts if all(isinstance(number, int) for number in texts) else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def load(target: str, folder: Path, dtype: str | None = None, span: Span = NOWHERE, base: str | None = "") -> Model:
    """Load the model that `target` names.

    `target` has one of four forms:

    - A name without a slash: a preset.
    - A folder, relative to `folder`.
    - A model's name on the Hugging Face Hub, if a preset has this name and no such folder exists.
    - The URL of a folder.

    A folder with an adapter has the model that the adapter belongs to, and the adapter as `initial`. `base` names this
    model, in one of the same forms; if it is "", the folder names it. With None, the folder of an adapter is an error.
    `dtype` (f32 or bf16) overrides the dtype of the model's config. Raises Fault with one of these codes:
    unknown-model, not-yet (an unsupported architecture or feature), bad-value.
    """
    is_url = urls.is_url(target) and not hub_name(target)
    url = urls.pin_version(target, True, span) if is_url else ""
    place = urls.copy(url, True, SHAPE, span) if is_url else folder / target
    bare = not is_url and "/" not in target and target not in (".", "..")
    if not bare and peft_folder.is_adapter_folder(place):
        if base is None:
            raise Fault(Diagnostic("not-yet", f"`{target}` is an adapter itself", span, peft_folder.MERGE))
        return _load_adapter(target, place, url, dtype, span, (base, folder))
    if base:
        message = f"`{target}` has no {peft_folder.CONFIG}, so `base` has no effect"
        raise Fault(Diagnostic("bad-value", message, span, "leave `base` out, or name the folder of an adapter"))
    hub = "" if bare or is_url or is_folder(place) else hub_name(target)
    if (bare or hub) and (preset := preset_names.find_preset(target)):
        return _make_model(target, "", PRESETS[preset], dtype, span)
    if bare or not is_file(place / "config.json"):
        raise Fault(_make_unknown_model(target, folder, hub, span))
    return _load_folder(target, place, url or str(place.resolve()), dtype, span)


def reload(model: Model) -> Model:
    """Load a model again, from its folders or its preset. Raises Fault."""
    current = load("./" if model.path else model.name, Path(model.path), model.dtype, model.span, None)
    if model.initial is None:
        return current
    folder = model.initial.folder
    config = read_config(Path(folder), folder, model.span, peft_folder.CONFIG)
    return dataclasses.replace(current, initial=peft_folder.find_adapter(config, current, folder, folder, model.span))


def _load_adapter(target: str, place: Path, url: str, dtype: str | None, span: Span, base: tuple[str, Path]) -> Model:
    """Load the adapter in the folder `place`, and the model that it belongs to.

    `base` has the model's name in the program, or "", and the folder that this name is relative to. A name in the
    adapter's folder is relative to that folder.
    """
    config = read_config(place, target, span, peft_folder.CONFIG)
    stated, folder = base
    named = stated or config.get(peft_folder.BASE)
    help = f'name the folder of its model: `"{target}" {{ base = "./my-model" }}`'
    if not isinstance(named, str) or not named:
        message = f"the adapter `{target}` does not name the model that it belongs to"
        raise Fault(Diagnostic("unknown-model", message, span, help))
    if not stated:
        named = f"./{named}" if is_folder(place / named) and not Path(named).is_absolute() else named
        folder = place
    try:
        model = load(named, folder, dtype, span, None)
    except Fault as fault:
        (problem,) = fault.diagnostics
        message = f"the model of the adapter `{target}`: {problem.message}"
        raise Fault(Diagnostic(problem.code, message, span, problem.help if stated else help)) from None
    path = url or str(place.resolve())
    return dataclasses.replace(model, initial=peft_folder.find_adapter(config, model, target, path, span))


def _load_folder(target: str, folder: Path, path: str, dtype: str | None, span: Span) -> Model:
    stated = read_config(folder, target, span)
    if isinstance(method := quantization.read_method(stated), str):
        message = f"the weights of `{target}` are quantized by the method `{method}`, which is not supported"
        read = " and ".join(f"`{known}`" for known in quantization.METHODS)
        help = f"name a folder with weights in float32, bfloat16 or float16; of quantized weights, {read} can be read"
        raise Fault(Diagnostic("not-yet", message, span, help))
    return _make_model(target, path, stated, dtype, span)


def _make_unknown_model(target: str, folder: Path, hub: str, span: Span) -> Diagnostic:
    """Return the diagnostic for an unknown model name, with a help text."""
    shape = "a plan needs only the model's `config.json`, in a folder"
    if hub:
        message = (
            f"`{target}` is not a folder here: it looks like a model's name on the Hugging Face Hub, which is not read"
        )
        help = f"{preset_names.download(hub)}; {shape}"
        if near := preset_names.find_similar_preset(hub):
            help = f"to plan with its shape, write the preset `{near}`; {help}"
    elif "/" in target or target in (".", ".."):
        exists = is_folder(folder / target) or urls.is_url(target)
        message = f"the model folder `{target}` {'has no config.json' if exists else 'does not exist'}"
        help = "a Hugging Face model folder holds a config.json"
    elif is_folder(folder / target):
        message = f"no model preset is called `{target}`"
        help = f'for the folder next to the program, write `"./{target}"`'
    else:
        message = f"no model preset is called `{target}`"
        help = preset_names.suggest_presets(target)
        if not help.startswith("did"):
            help += f"; {shape}, a run also its weights: write a folder with a slash, `./my-model`"
    return Diagnostic("unknown-model", message, span, help)


def read_config(folder: Path, name: str, span: Span = NOWHERE, file: str = "config.json") -> dict[str, Any]:
    """Read the config.json of a model's folder, or another file with a JSON object.

    Of a model that also reads images, the result is the part for text. `name` is the name of the folder in messages.
    Raises Fault (unknown-model) if the file cannot be read or is not a JSON object.
    """
    try:
        config = json.loads((folder / file).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        help = fix_commands.lfs(folder / file)
        raise Fault(Diagnostic("unknown-model", f"`{name}/{file}` cannot be read: {error}", span, help)) from None
    if not isinstance(config, dict):
        raise Fault(Diagnostic("unknown-model", f"`{name}/{file}` is not a JSON object", span))
    return _select_text_part(config)


def _select_text_part(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part for text of a config.

    A model may also read images. The result is a config of the family that the part belongs to. Other configs are
    returned unchanged.
    """
    kind = config.get("model_type")
    text = config.get("text_config")
    family = next((family for family in FAMILIES.values() if family.multimodal and family.multimodal == kind), None)
    if family is None or not isinstance(text, dict):
        return config
    shared = {name: config[name] for name in SHARED if config.get(name) is not None}
    return {**text, **shared, "architectures": [family.architecture], "model_type": family.name}


def _make_model(name: str, path: str, config: Mapping[str, object], dtype: str | None, span: Span) -> Model:
    family = _find_family(name, config, span)
    fields = read_fields(config, family.config)
    if isinstance(fields, ConfigError):
        if fields.feature:
            help = f"no engine supports {fields.feature} yet: use a model without it"
            message = f"the config.json of `{name}` {fields.message}, so the model can be neither planned nor run"
            raise Fault(Diagnostic("not-yet", message, span, help))
        raise _config_fault(name, fields.message, span)
    stated = str(dtype or config.get("torch_dtype") or config.get("dtype") or "bfloat16")
    if stated not in DTYPES:
        raise Fault(
            Diagnostic("bad-value", f"weights of type `{stated}` are not supported", span, "known here: `f32`, `bf16`")
        )
    stack = tuple(family.layers(fields))
    tied = bool(fields.tie_word_embeddings)
    return Model(
        name=name,
        path=path,
        family=family.name,
        dtype=DTYPES[stated],
        hidden=fields.hidden_size,
        vocabulary=fields.vocab_size,
        tied=tied,
        stack=stack,
        features=tuple(_list_features(family, fields, stack)),
        tensors=tuple(_iterate_tensors(fields.hidden_size, fields.vocab_size, tied, stack, family.name_in_files)),
        span=span,
    )


def read_engine_fields(model: Model) -> dict[str, Any]:
    """Return the fields of a model's config.json that an engine needs.

    The model is not a preset: it has a folder.
    """
    return engine_fields(_read_fields(model))


def read_folder_weights(model: Model) -> dict[str, FolderWeight]:
    """Return the weights in the files of a model's folder, by name.

    The model is not a preset: it has a folder. Raises UnclearError if the files are incomplete or ambiguous, and
    UnreadableFile if a file cannot be read.
    """
    method = quantization.read_method(read_config(Path(model.path), model.name, model.span))
    weights = quantization.read_folder(model.path, None if isinstance(method, str) else method)
    return {re.sub(f"^{re.escape(TEXT_PART)}", "model.", name): weight for name, weight in weights.items()}


def find_published_type(model: Model) -> str | None:
    """Return the type of a folder's weights if no engine trains in it, or else None."""
    config = read_config(Path(model.path), model.name, model.span)
    if isinstance(method := quantization.read_method(config), quantization.Quantization):
        return method.method
    return "float16" if "float16" in (config.get("torch_dtype"), config.get("dtype")) and model.dtype != "f32" else None


def suggest_weights(model: Model) -> str:
    """Return how to get the weights of a model that is a preset."""
    if model.initial is not None:
        return 'name the folder of the adapter\'s model: `model policy = "./my-adapter" { base = "./my-model" }`'
    hub = hub_name(model.name)
    return preset_names.download(hub) if hub else 'name a folder: model policy = "./my-model"'


def find_position_limit(model: Model) -> int:
    """Return the largest number of positions that a sequence can have.

    The model is not a preset: it has a folder.
    """
    return count_positions(_read_fields(model), FAMILIES[model.family].positions)


def list_unused_weights(model: Model) -> tuple[str, ...]:
    """Return the prefixes of the names of weights that no engine reads."""
    family = FAMILIES[model.family]
    return (*family.unused(model.layers), *(("model.visual.",) if family.multimodal else ()))


def _read_fields(model: Model) -> ModelConfig:
    config = read_config(Path(model.path), model.name, model.span)
    fields = read_fields(config, FAMILIES[model.family].config)
    if isinstance(fields, ConfigError):  # the file has changed since the program was compiled
        raise _config_fault(model.name, fields.message, model.span)
    return fields


def _find_family(name: str, config: Mapping[str, object], span: Span) -> Family:
    """Return the family of a config.json. Raises Fault if the family is unknown."""
    architectures = config.get("architectures")
    kind = config.get("model_type")
    if isinstance(architectures, list) and architectures:
        # A model with a classification head has the body of the causal model (see Model.scoring).
        architecture = re.sub("For(Sequence|Token)Classification$", "ForCausalLM", str(architectures[0]))
        family = find_family(architecture)
    else:
        architecture = kind if isinstance(kind, str) else "unknown"
        family = FAMILIES.get(architecture)
    if family is None:
        known = ", ".join(f"`{known.architecture}`" for known in FAMILIES.values())
        message = f"models of architecture `{architecture}` can be neither planned nor run"
        raise Fault(Diagnostic("not-yet", message, span, f"supported: {known}"))
    if kind not in (None, family.name, *family.other_names):
        named = f"has the architecture `{architecture}`, but {kind!r} for its `model_type`"
        raise _config_fault(name, f"{named}, which must be {family.name!r}", span)
    return family


def _config_fault(name: str, problem: str, span: Span) -> Fault:
    help = "a config.json belongs to its weights: copy both again"
    return Fault(Diagnostic("unknown-model", f"the config.json of `{name}` {problem}", span, help))


def _list_features(family: Family, config: ModelConfig, stack: Sequence[Layer]) -> Iterator[str]:
    """Yield the features of a model, each once, in the order of FEATURES."""
    features = {*family.features, *config.list_features()}
    features |= {feature for layer in stack for feature in layer.list_features()}
    mlps = [isinstance(mlp, ExpertMlp) for mlp, _ in groupby(layer.mlp for layer in stack)]
    # Layers that differ only in rotary positions have the same sizes: a feature by itself ("no_rope").
    mixers = [layer.mixer for layer in stack]
    sizes = {replace(mixer, no_rope=False) if isinstance(mixer, GroupedQueryAttention) else mixer for mixer in mixers}
    if len(sizes) > 1 or mlps not in ([False], [True], [False, True]):
        features.add("mixed_layers")
    if config.tie_word_embeddings:
        features.add("tied_head")
    features |= {f"rope_{kind}" for table in config.rope_tables if (kind := table["rope_type"]) != "default"}
    # A family of another package may have features that are not known here.
    return (feature for feature in (*FEATURES, *sorted(features - FEATURES.keys())) if feature in features)


def _iterate_tensors(
    hidden: int, vocabulary: int, tied: bool, stack: Sequence[Layer], name_in_files: Callable[[str], str] | None
) -> Iterator[Tensor]:
    """Yield the tensors of a model in the model's order, with their names in files."""
    for tensor in _iterate_plain_tensors(hidden, vocabulary, tied, stack):
        name = tensor.file_name or tensor.name
        yield dataclasses.replace(tensor, file_name=name_in_files(name)) if name_in_files else tensor


def _iterate_plain_tensors(hidden: int, vocabulary: int, tied: bool, stack: Sequence[Layer]) -> Iterator[Tensor]:
    """Yield the tensors of a model in the model's order."""
    layers = sum(layer.count for layer in stack)
    embedding = (vocabulary, hidden)
    yield Tensor(EMBEDDING, embedding, 0, padded=True, tied=tied, layer=-1, layers=layers)
    for number, layer in enumerate(each for each in stack for _ in range(each.count)):
        make = partial(_layer_tensor, number, layers)
        yield from layer.list_tensors(make, hidden)
    yield Tensor("model.norm.weight", (hidden,), layer=layers, layers=layers)
    if not tied:
        yield Tensor(LOGITS, embedding, 0, padded=True, layer=layers, layers=layers)


def _layer_tensor(layer: int, layers: int, name: str, shape: tuple[int, ...], tp_dim: int = -1, **more: Any) -> Tensor:
    prefix = f"model.layers.{layer}."
    if "file_name" in more:
        more["file_name"] = f"{prefix}{more['file_name']}"
    return Tensor(f"{prefix}{name}", shape, tp_dim, layer=layer, layers=layers, **more)
