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

from ..engine_protocols import GenerateRequest, Response

if TYPE_CHECKING:
    from .stops import Stops


def generate_in_segments(
    generate: Callable[[GenerateRequest], Iterator[Response]], request: GenerateRequest, stops: Stops | None = None
) -> Iterator[Response]:
    """Generate responses; yield each one in parts of `request.stretch` tokens.

    This function implements `Generator.generate` (engine_protocols.py) for requests with a `stretch`.

    - `generate`: the engine's function that generates whole responses.
    - `stops`: the search for strings that end a response; None if no string ends a response.

    Each part is a new request, so the engine gets the prompt and all earlier parts of the response as input again.
    """
    import numpy as np

    sampling = request.sampling
    count = len(request.keys)
    contexts = request.response_prompts
    begun = np.broadcast_to(request.begun, count).copy()
    joined = np.broadcast_to(sampling.joined, count).copy()
    longest = np.broadcast_to(np.asarray(sampling.max_tokens), count)
    live = np.arange(count)
    while len(live):
        bounds = np.minimum(begun[live] + request.stretch, longest[live])
        segment_sampling = replace(sampling.select(live), max_tokens=bounds, joined=joined[live])
        ended = np.zeros(count, bool)
        prompts = [contexts[i] for i in live]
        for response in generate(GenerateRequest(prompts, request.keys[live], segment_sampling, begun[live])):
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
