"""The MLPs of a model's layers, with and without experts.

Invariant: as in layers.py, the classes are plain data, and each yields the tensors of its part of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import msgspec

from ..sharding.tensors import Tensor

MakeTensor = Callable[..., Tensor]  # (name in the layer, shape, dim that tp shards, options of Tensor)
# What Mixtral's files call a layer's experts, and an expert's projections.
BLOCK_SPARSE = "block_sparse_moe"
BLOCK_SPARSE_PROJECTIONS = {"gate": "w1", "up": "w3", "down": "w2"}
# What Granite's files call the same. They have one tensor for the projections gate and up, and all experts.
SHARED_MLP = "shared_mlp"
LINEAR_INPUT = "input_linear"
LINEAR_OUTPUT = "output_linear"


class DenseMlp(msgspec.Struct, frozen=True, tag="mlp"):
    """An MLP.

    - `fused`: whether the files have the projections gate and up as one tensor, `gate_up_proj`.
    - `ungated`: whether the MLP has no projection gate.
    - `linear`: whether module and projections have other names in the files, those of Granite's.
    """

    intermediate: int
    bias: bool = False
    fused: bool = False
    ungated: bool = False
    linear: bool = False

    @property
    def width(self) -> int:
        """The intermediate size that a token passes through."""
        return self.intermediate

    @property
    def projections(self) -> int:
        """The number of projections: gate, up and down."""
        return 3 - self.ungated

    @property
    def projected(self) -> int:
        """The widths of all projections together."""
        return self.projections * self.width

    @property
    def kept(self) -> int:
        """How many tensors of the intermediate size a backward pass needs.

        With a gate, these are the results of gate and up, of the activation, and of the product. Without a gate, they
        are two results of the activation.
        """
        return 2 if self.ungated else 4

    @property
    def concatenates(self) -> bool:
        """Whether engines concatenate the outputs of gate and up."""
        return self.fused or self.linear

    def count_saved(self, hidden: int, etp: int) -> tuple[int, int]:
        """Return how many elements per token are saved for a backward pass.

        The result is a pair: elements that each tp rank saves, and elements that are sharded over tp.
        """
        return 0, self.kept * self.intermediate

    def list_divided(self) -> Iterator[tuple[int, str]]:
        """Yield the sizes that tp must divide, with their names."""
        yield self.intermediate, "intermediate size"

    def list_features(self) -> Iterator[str]:
        if self.bias:
            yield "mlp_bias"
        if self.ungated:
            yield "ungated_mlp"
        if self.linear:
            yield "linear_mlp"

    def list_tensors(self, make: MakeTensor, hidden: int) -> Iterator[Tensor]:
        for name, size, tp_dim in _projections(hidden, self.intermediate, self.ungated):
            more = {}
            if self.linear:
                more = _name_linear(SHARED_MLP, name, self.intermediate)
            elif self.fused and tp_dim == 0:
                more = {"fused": "gate_up_proj", "start": self.intermediate * (name == "up")}
            yield from iterate_linear(make, f"mlp.{name}_proj", size, tp_dim, self.bias, **more)


class NoMlp(DenseMlp, frozen=True, tag="no_mlp"):
    """The MLP of a layer that has only a mixer: it has no weights and costs nothing."""

    intermediate: int = 0

    def list_features(self) -> Iterator[str]:
        yield "single_layers"

    def list_tensors(self, make: MakeTensor, hidden: int) -> Iterator[Tensor]:
        yield from ()


class ExpertMlp(msgspec.Struct, frozen=True, tag="experts"):
    """Experts, of which a router picks some for each token.

    - `number`: the number of experts.
    - `active`: the number of experts that the router picks for each token.
    - `intermediate`: the intermediate size of one expert.
    - `shared`: the intermediate size of all shared experts together. Every token passes through the shared experts.
    - `router`: `softmax` scores all experts. `sigmoid` does so, too, and a bias corrects its scores. `grouped_sigmoid`
      also first chooses groups of experts (arXiv:2412.19437).
    - `shared_gate`: whether each token has a gate for the shared experts.
    - `block_sparse`: whether experts and projections have other names in the files, those of Mixtral's.
    - `ungated`: whether experts have no projection gate, and shared experts neither.
    - `linear`: whether experts and projections have other names in the files, those of Granite's.
    """

    number: int
    active: int
    intermediate: int
    shared: int = 0
    router: Literal["softmax", "sigmoid", "grouped_sigmoid"] = "softmax"
    block_sparse: bool = False
    shared_gate: bool = False
    ungated: bool = False
    linear: bool = False

    @property
    def width(self) -> int:
        """The intermediate size that a token passes through."""
        return self.active * self.intermediate + self.shared

    @property
    def projections(self) -> int:
        """The number of projections of an expert: gate, up and down."""
        return 3 - self.ungated

    @property
    def projected(self) -> int:
        """The widths of all projections together."""
        return self.projections * self.width

    @property
    def kept(self) -> int:
        """How many tensors of the intermediate size an expert saves for a token."""
        return 2 if self.ungated else 4

    @property
    def held(self) -> int:
        """How many tensors of the intermediate size an expert holds at once for a token."""
        return 3

    @property
    def corrected(self) -> bool:
        """Whether a bias corrects the router's scores."""
        return self.router in ("sigmoid", "grouped_sigmoid")

    def count_saved(self, hidden: int, etp: int) -> tuple[int, int]:
        """Return how many elements per token are saved for a backward pass.

        The result is a pair: the router's scores, which each tp rank saves, and elements that are sharded over tp. A
        copy of each token is sent to each expert that the router chooses; the copies are spread evenly over ep. For
        each copy, its input, its output and `kept` tensors of the intermediate size are saved. Each of an expert's
        `etp` ranks receives all of the expert's tokens, and has a part of the width.
        """
        shared = (2 if self.ungated else 4) * self.shared
        return self.number, shared + self.active * (2 * hidden * etp + self.kept * self.intermediate)

    def list_divided(self) -> Iterator[tuple[int, str]]:
        """Yield the sizes that tp must divide, with their names."""
        if self.shared:
            yield self.shared, "shared experts' size"

    def list_features(self) -> Iterator[str]:
        yield f"{self.router}_router"
        if self.shared:
            yield "gated_shared_experts" if self.shared_gate else "shared_experts"
        if self.ungated:
            yield "ungated_mlp"
        if self.linear:
            yield "linear_mlp"

    def list_tensors(self, make: MakeTensor, hidden: int) -> Iterator[Tensor]:
        """Yield the tensors of the router and the experts.

        The experts form one tensor per projection. The bias that corrects the router's scores is a buffer.
        """

        def name_in_files(name: str) -> dict[str, str]:
            """Return the option `file_name` of a tensor, if it has another name in the files."""
            return {"file_name": f"{BLOCK_SPARSE}.{name}"} if self.block_sparse or self.linear else {}

        router = "router.layer.weight" if self.linear else "gate.weight"
        yield make("mlp.gate.weight", (self.number, hidden), **name_in_files(router))
        for name, size, tp_dim in _projections(hidden, self.intermediate, self.ungated):
            more: dict[str, Any] = name_in_files(f"experts.*.{BLOCK_SPARSE_PROJECTIONS[name]}.weight")
            if self.linear:
                more = _name_linear(BLOCK_SPARSE, name, self.intermediate)
            stacked = (self.number, *size)
            yield make(f"mlp.experts.*.{name}_proj.weight", stacked, tp_dim + 1, experts=True, **more)
        shared = "shared_expert" if self.shared_gate else "shared_experts"
        for name, size, tp_dim in _projections(hidden, self.shared, self.ungated) if self.shared else ():
            more = _name_linear(SHARED_MLP, name, self.shared) if self.linear else {}
            yield make(f"mlp.{shared}.{name}_proj.weight", size, tp_dim, **more)
        if self.shared_gate:
            yield make("mlp.shared_expert_gate.weight", (1, hidden))
        if self.corrected:
            # Transformers has the bias next to the router if the files do.
            owner = "mlp" if self.block_sparse else "mlp.gate"
            file_name = name_in_files("e_score_correction_bias")
            yield make(f"{owner}.e_score_correction_bias", (self.number,), role="buffer", **file_name)


class ClampedExpertMlp(ExpertMlp, frozen=True, tag="clamped_experts"):
    """Experts with biases and a clamped activation (arXiv:2508.10925, section 2.3).

    The experts form one tensor per projection in the files, too. Gate and up are one projection, whose outputs
    alternate. The router has a bias, and applies softmax to the scores of the experts that it picks.
    """

    @property
    def kept(self) -> int:
        return 7  # gate and up, the sigmoid, and the results of clamping and of the two products

    @property
    def held(self) -> int:
        return 6  # gate and up, without biases, with them, and the biases

    def list_features(self) -> Iterator[str]:
        yield "clamped_experts"

    def list_tensors(self, make: MakeTensor, hidden: int) -> Iterator[Tensor]:
        """Yield the tensors of the router and the experts.

        Of the experts' weights, dim 1 is the input, and dim 2 the output.
        """
        number = self.number
        width = self.intermediate
        yield make("mlp.router.weight", (number, hidden))
        yield make("mlp.router.bias", (number,))
        yield make("mlp.experts.gate_up_proj", (number, hidden, 2 * width), 2, unit=2, experts=True)
        yield make("mlp.experts.gate_up_proj_bias", (number, 2 * width), 1, unit=2, experts=True)
        yield make("mlp.experts.down_proj", (number, width, hidden), 1, experts=True)
        yield make("mlp.experts.down_proj_bias", (number, hidden), experts=True)


Mlp = DenseMlp | NoMlp | ExpertMlp | ClampedExpertMlp


def iterate_linear(
    make: MakeTensor, name: str, size: tuple[int, int], tp_dim: int, bias: bool, **more: Any
) -> Iterator[Tensor]:
    """Yield the weight of a projection, and its bias if it has one."""
    yield make(f"{name}.weight", size, tp_dim, **more)
    if bias:
        # The bias of a row-parallel projection is added once, after the sum, so every rank has it.
        yield make(f"{name}.bias", size[:1], *((0,) if tp_dim == 0 else ()), **(more if tp_dim == 0 else {}))


def _projections(hidden: int, width: int, ungated: bool = False) -> tuple[tuple[str, tuple[int, int], int], ...]:
    """Return the (name, shape, sharded dim) of each projection of an MLP."""
    gate, *others = ("gate", (width, hidden), 0), ("up", (width, hidden), 0), ("down", (hidden, width), 1)
    return (*others,) if ungated else (gate, *others)


def _name_linear(module: str, projection: str, width: int) -> dict[str, Any]:
    """Return where Granite's files have a projection: the options of its tensor."""
    if projection == "down":
        return {"file_name": f"{module}.{LINEAR_OUTPUT}.weight"}
    return {"file_name": f"{module}.{projection}.weight", "fused": LINEAR_INPUT, "start": width * (projection == "up")}
