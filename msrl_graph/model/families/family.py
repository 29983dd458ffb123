"""What a module of a model family states."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ..fields import ModelConfig
from ..layers import Layer


@dataclass(frozen=True)
class Family:
    """A family of models.

    - `name`: the `model_type` of a config.json.
    - `architecture`: transformers' class of a causal model.
    - `config`: the fields of a config.json that an engine reads.
    - `layers`: yields the layers of a model, for a config that `fields.read_fields` returned.
    - `features`: the features (features.py) that all models of the family have, beside those of their layers.
    - `positions`: the number of positions if a config has no `max_position_embeddings`; the default of the class.
    - `name_in_files`: returns the name of a tensor in the files, from its name in msrl_graph. The layers can say more
      (`Tensor.file_name`).
    - `unused`: beginnings of the names of weights that no engine reads, for a number of layers.
    - `other_names`: other values of `model_type` that published configs with this architecture have.
    - `multimodal`: the `model_type` of configs whose `text_config` is a config of this family.
    """

    name: str
    architecture: str
    config: type[ModelConfig]
    layers: Callable[[Any], Iterator[Layer]]
    features: frozenset[str] = frozenset()
    positions: int = 32768
    name_in_files: Callable[[str], str] | None = None
    unused: Callable[[int], tuple[str, ...]] = lambda layers: ()
    other_names: tuple[str, ...] = ()
    multimodal: str = ""
