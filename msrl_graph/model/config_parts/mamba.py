"""Layers of Mamba-2 among others, as configs of several families state them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from ..fields import ConfigError, format_value

MAMBA = "linear_attention"
ATTENTION = "full_attention"
# What published configs call these layers. Transformers renames them.
_OTHER_NAMES = {"mamba": MAMBA, "attention": ATTENTION}


def rename_kinds(kinds: Sequence[object]) -> list[object]:
    """Return kinds of layers, by the names that transformers gives them."""
    return [_OTHER_NAMES.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]


def check_kinds(field: str, kinds: Sequence[str], layers: int, known: Collection[str]) -> Iterator[ConfigError]:
    """Report kinds of layers that are not known, or whose number is wrong."""
    if len(kinds) != layers:
        yield ConfigError(f"has {len(kinds):,} `{field}` for {layers:,} layers")
    elif other := [kind for kind in kinds if kind not in known]:
        names = ", ".join(f"`{name}`" for name in known)
        message = f"has layers of {format_value(other[0])}: only {names} are supported yet"
        yield ConfigError(message, f"layers of `{other[0]}`")


def check_mamba(heads: int, groups: int, bias_field: str, bias: bool) -> Iterator[ConfigError]:
    """Report Mamba-2 layers that no engine could compute.

    `bias` says whether projections have biases, in the field `bias_field`. With them, transformers lets padding change
    the first tokens of a row.
    """
    if heads % groups:
        yield ConfigError(f"has {groups:,} groups of Mamba-2 heads, which do not divide its {heads:,} heads")
    if bias:
        message = f"has true for `{bias_field}`: Mamba-2 layers are supported only without biases of projections yet"
        yield ConfigError(message, "biases of the projections of Mamba-2 layers")
