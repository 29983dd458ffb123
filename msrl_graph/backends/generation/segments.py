"""Responses in stretches, by an engine that knows only whole ones: each stretch is asked for by itself.

Invariant: a response's parts, end to end, are what is drawn for it at once, up to the rounding of logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ..spec import Response, Sampling

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .stops import Stops

Draw = Callable[["list[NDArray[np.int32]]", "NDArray[np.uint64]", Sampling, "NDArray[np.int64]"], "Iterator[Response]"]


def in_stretches(
    draw: Draw,
    prompts: list[NDArray[np.int32]],
    keys: NDArray[np.uint64],
    sampling: Sampling,
    begun: NDArray[np.int64],
    stretch: int,
    stops: Stops | None = None,
) -> Iterator[Response]:
    """What `Generator.generate` gives with a `stretch`, by a `draw` that has none: what is under way is computed anew
    in each. `stops` looks for the strings that end a response."""
    import numpy as np

    each = len(keys) // len(prompts)
    contexts = [prompts[i // each] for i in range(len(keys))]
    begun = begun.copy()
    joined = np.broadcast_to(sampling.joined, len(keys)).copy()
    live = np.arange(len(keys))
    longest = np.broadcast_to(np.asarray(sampling.max_tokens), len(keys))
    while len(live):
        bounds = np.minimum(begun[live] + stretch, longest[live])
        some = replace(sampling.of(live), max_tokens=bounds, joined=joined[live])
        ended = np.zeros(len(keys), bool)
        for drawn in draw([contexts[i] for i in live], keys[live], some, begun[live]):
            place = int(live[drawn.place])
            contexts[place] = np.concatenate([contexts[place], drawn.tokens])
            begun[place] += len(drawn.tokens)
            joined[place] += len(drawn.tokens)
            # What stops before its stretch has ended is over, by an end token or a stop string; so may be what stops
            # just there.
            whole = int(drawn.tokens[-1]) in sampling.ends or begun[place] == longest[place]
            ended[place] = whole or begun[place] < bounds[drawn.place]
            if stops is not None and not ended[place]:
                ended[place] = stops([contexts[place][-joined[place] :]])[0]
            yield Response(place, drawn.tokens, drawn.logps, bool(ended[place]))
        live = live[~ended[live]]
