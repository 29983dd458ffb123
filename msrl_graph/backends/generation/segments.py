"""Generation in parts, for an engine that generates only whole responses.

A response is generated in stretches: parts with a given number of tokens. Each stretch is a separate request to the
engine.

Invariant: the concatenated stretches of a response equal the response that a single request would return, up to the
rounding of logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ..engine_protocols import Response, Sampling

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .stops import Stops

Draw = Callable[["list[NDArray[np.int32]]", "NDArray[np.uint64]", Sampling, "NDArray[np.int64]"], "Iterator[Response]"]


def generate_in_segments(
    draw: Draw,
    prompts: list[NDArray[np.int32]],
    keys: NDArray[np.uint64],
    sampling: Sampling,
    begun: NDArray[np.int64],
    stretch: int,
    stops: Stops | None = None,
) -> Iterator[Response]:
    """Generate responses, and yield each response in parts of `stretch` tokens.

    This function implements `Generator.generate` (engine_protocols.py) for calls with a `stretch`.

    - `draw`: the engine's function that generates whole responses.
    - `begun`: for each response, the number of its tokens that an earlier call has generated. These tokens are the last
      tokens of the response's prompt.
    - `stops`: the search for strings that end a response; None if no string ends a response.

    Each part is a new request, so the engine gets the prompt and all earlier parts of the response as input again.
    """
    import numpy as np

    samples_per_prompt = len(keys) // len(prompts)
    contexts = [prompts[i // samples_per_prompt] for i in range(len(keys))]
    begun = begun.copy()
    joined = np.broadcast_to(sampling.joined, len(keys)).copy()
    live = np.arange(len(keys))
    longest = np.broadcast_to(np.asarray(sampling.max_tokens), len(keys))
    while len(live):
        bounds = np.minimum(begun[live] + stretch, longest[live])
        segment_sampling = replace(sampling.select(live), max_tokens=bounds, joined=joined[live])
        ended = np.zeros(len(keys), bool)
        for response in draw([contexts[i] for i in live], keys[live], segment_sampling, begun[live]):
            place = int(live[response.place])
            contexts[place] = np.concatenate([contexts[place], response.tokens])
            begun[place] += len(response.tokens)
            joined[place] += len(response.tokens)
            # A response that stops before the end of its stretch is complete: an end token or a stop string ended it.
            # One that stops exactly at the end of its stretch may be complete too.
            is_complete = int(response.tokens[-1]) in sampling.ends or begun[place] == longest[place]
            ended[place] = is_complete or begun[place] < bounds[response.place]
            if stops is not None and not ended[place]:
                ended[place] = stops([contexts[place][-joined[place] :]])[0]
            yield Response(place, response.tokens, response.logps, bool(ended[place]))
        live = live[~ended[live]]
