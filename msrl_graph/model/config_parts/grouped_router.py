"""Experts with DeepSeek-V3's router, as configs of several families state them.

Source: arXiv:2412.19437.

The router first chooses groups of experts, and then experts in these groups. With one group, it chooses among all.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import UNSET

from ..fields import Above, ConfigError, Count, Flag, ModelConfig, Size, format_value
from ..layers import DenseMlp, ExpertMlp, Layer, Mixer

# Fields of the router that no engine reads, because the families have one kind of router only.
ROUTER = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}


class GroupedRouterConfig(ModelConfig, frozen=True, kw_only=True):
    moe_intermediate_size: Size
    num_experts_per_tok: Size
    n_routed_experts: Size
    n_shared_experts: Size
    first_k_dense_replace: Count
    n_group: Size
    topk_group: Size
    norm_topk_prob: Flag
    routed_scaling_factor: Above
    scoring_func: object = UNSET
    topk_method: object = UNSET
    moe_layer_freq: object = UNSET

    def find_router_errors(self) -> Iterator[ConfigError]:
        """Check the router.

        A group is chosen by the scores of its two best experts, so a group must have two or more experts.
        """
        for name, only in ROUTER.items():
            if (value := getattr(self, name)) not in (UNSET, only):
                message = f"has {format_value(value)} for `{name}`: only `{only}` is supported yet"
                known = isinstance(value, str | int)
                yield ConfigError(message, f"routers with `{name} = {value}`" if known else "")
        layers = self.num_hidden_layers
        first = self.first_k_dense_replace
        if first >= layers:
            yield ConfigError(f"has {first:,} layers without experts, but only {layers:,} layers")
        yield from check_groups(self.n_routed_experts, self.n_group, self.topk_group, self.num_experts_per_tok)


def check_groups(number: int, groups: int, chosen: int, active: int) -> Iterator[ConfigError]:
    """Report groups of experts from which a router cannot choose.

    There are `number` experts, in `groups` groups. The router chooses `chosen` groups, and `active` experts in them.
    """
    if number % groups or number // groups < 2:
        equal = "groups must be equal, with 2 or more experts each"
        yield ConfigError(f"has {number:,} experts in {groups:,} groups: {equal}")
    if chosen > groups:
        yield ConfigError(f"chooses {chosen:,} of {groups:,} groups of experts")
    if active > (reachable := number // groups * chosen):
        yield ConfigError(f"has {active:,} experts per token, but only {reachable:,} to choose from")


def list_layers(config: GroupedRouterConfig, mixer: Mixer) -> Iterator[Layer]:
    """Yield the layers without experts, and then those with experts."""
    first = config.first_k_dense_replace
    width = config.moe_intermediate_size
    shared = config.n_shared_experts * width
    experts = ExpertMlp(config.n_routed_experts, config.num_experts_per_tok, width, shared, "grouped_sigmoid")
    if first:
        yield Layer(mixer, DenseMlp(config.intermediate_size), first)
    yield Layer(mixer, experts, config.num_hidden_layers - first)


def list_prediction_weights(layers: int) -> tuple[str, ...]:
    """Return how the names of the layer for multi-token prediction begin.

    No engine reads this layer.
    """
    return (f"model.layers.{layers}.",)
