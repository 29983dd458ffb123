"""Continuous batching: new sequences replace ended sequences of a running batch.

A row is one response. A place is an index in the batch dimension of the KV cache.

Invariant: the tokens that are drawn for a row do not depend on the other rows of the batch. As long as several rows
have the same tokens, they share one place. Prompts are padded at the left, so that the sequences in all places end at
the same column of the cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from ..engine_protocols import GenerateRequest, Response, Sampling
from .layer_caches import join_places, select_places, stack_padded
from .stops import Stops, join_response

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

# The next sequences start when this share of the slots is free, or when all remaining ones fit: admitting sequences
# copies the whole cache.
FREE = 1 / 4


class Network(Protocol):
    """The interface that a SequenceBatch needs from an engine."""

    place: torch.device

    def cache(self) -> Any:
        """Return an empty KV cache."""

    def logits(self, ids: torch.Tensor, mask: torch.Tensor, position: torch.Tensor, cache: Any) -> torch.Tensor:
        """Return the logits of each sequence's next token, [sequences, vocabulary].

        The logits are float32. The tokens `ids` [sequences, tokens] are appended to the KV cache.
        """

    def routes(self) -> NDArray[np.int16]:
        """Return the routes of the last call of `logits`, [sequences x tokens, layers, k].

        They exist only while a request asks for routes.
        """

    def draw(
        self, logits: torch.Tensor, keys: NDArray[np.uint64], steps: NDArray[np.int64], sampling: Sampling
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Draw one token per row of `logits`; return tokens and log-probabilities.

        Each row has a noise key in `keys` and a step in `steps`, which decide what is drawn.
        """


class SequenceBatch:
    """The responses to some prompts, generated with continuous batching.

    - `slots`: the largest number of responses that are generated at once.
    - `stops`: the search for strings that end a response; None if no string ends a response.
    """

    def __init__(self, network: Network, request: GenerateRequest, slots: int, stops: Stops | None) -> None:
        import numpy as np

        self.network = network
        self.prompts = request.prompts
        self.returns_routes = request.routes
        self.sampling = request.sampling
        keys = self.keys = request.keys
        self.samples_per_prompt = request.samples_per_prompt
        self.begun = np.broadcast_to(request.begun, len(keys))
        self.joined = np.broadcast_to(request.sampling.joined, len(keys))
        self.room = request.room
        self.slots = max(slots, 1)
        self.stops = stops
        self.tokens = np.zeros((len(keys), self.room.max()), np.int32)
        self.logps = np.zeros((len(keys), self.room.max()), np.float32)
        self.lengths = np.zeros(len(keys), np.int64)
        self.reported = np.zeros(len(keys), np.int64)  # per row: tokens that were returned to the caller
        self.prompt_routes: dict[int, NDArray[np.int16]] = {}  # of the started prompts, if the request asks for routes
        self.routes: NDArray[np.int16] | None = None  # [rows, tokens, layers, k], of the drawn tokens
        self.started = 0  # number of rows that have started
        self.running = np.zeros(0, np.int64)  # row indices
        self.places = np.zeros(0, np.int64)  # per running row: its place in the batch, which is an index into:
        self.logits: torch.Tensor | None = None
        self.mask: torch.Tensor | None = None
        self.cache: Any = None

    def step(self) -> list[Response]:
        """Draw a token for each running response; return the responses that ended.

        A response ends with an end token, with a stop string, or when it has the largest allowed number of tokens.
        Before the draw, waiting responses are started if enough slots are free.
        """
        self._admit_rows()
        return self._take_responses(self._draw_tokens(), True)

    def parts(self) -> list[Response]:
        """Return, for each running response, the tokens that no earlier call has returned."""
        return self._take_responses(self.running, False)

    def _take_responses(self, rows: NDArray[np.int64], ended: bool) -> list[Response]:
        spans = [(int(row), slice(self.reported[row], self.lengths[row])) for row in rows]
        self.reported[rows] = self.lengths[rows]
        return [
            Response(row, self.tokens[row, span].copy(), self.logps[row, span].copy(), ended, self._find_routes(row))
            for row, span in spans
        ]

    def _find_routes(self, row: int) -> NDArray[np.int16] | None:
        """Return the routes of a response and its prompt, without those of the last token."""
        import numpy as np

        if not self.returns_routes:
            return None
        prompt = self.prompt_routes[row // self.samples_per_prompt]
        return prompt if self.routes is None else np.concatenate([prompt, self.routes[row, : self.lengths[row] - 1]])

    def _keep_routes(self, routes: NDArray[np.int16]) -> None:
        """Store the routes [places, layers, k] of the last token of each running response."""
        import numpy as np

        if self.routes is None:
            self.routes = np.zeros((len(self.keys), self.tokens.shape[1], *routes.shape[1:]), np.int16)
        self.routes[self.running, self.lengths[self.running] - 1] = routes[self.places]

    @property
    def unfinished(self) -> bool:
        """Whether any response has not yet ended."""
        return bool(len(self.running)) or self.started < len(self.keys)

    def _admit_rows(self) -> None:
        """Add waiting rows to the batch if enough slots are free.

        Prompts with the same tokens are computed only once. All rows of a prompt start together, unless there are more
        than free slots; then the prompt is computed again when its other rows start.
        """
        import numpy as np
        import torch

        waiting = len(self.keys) - self.started
        has_running = len(self.running) > 0
        count = min(self.slots - len(self.running), waiting)
        whole = (self.started + count) // self.samples_per_prompt * self.samples_per_prompt - self.started
        count = whole if whole > 0 else count
        if not count or (has_running and count < min(waiting, FREE * self.slots)):
            return
        rows = np.arange(self.started, self.started + count)
        prompts_of_rows = rows // self.samples_per_prompt
        first_prompt = int(prompts_of_rows[0])
        new_prompts = self.prompts[first_prompt : prompts_of_rows[-1] + 1]
        first_by_content = {prompt.tobytes(): i for i, prompt in reversed([*enumerate(new_prompts)])}
        first = sorted(first_by_content.values())
        width = max(len(new_prompts[i]) for i in first)
        ids = torch.zeros(len(first), width, dtype=torch.long)
        mask = torch.zeros(len(first), width, dtype=torch.long)
        for row, i in enumerate(first):
            ids[row, width - len(new_prompts[i]) :] = torch.from_numpy(new_prompts[i].astype(np.int64))
            mask[row, width - len(new_prompts[i]) :] = 1
        place = self.network.place
        cache = self.network.cache()
        ids = ids.to(place, non_blocking=True)
        mask = mask.to(place, non_blocking=True)
        logits = self.network.logits(ids, mask, (mask.cumsum(1) - 1).clamp(min=0), cache)
        places_of_prompts = np.searchsorted(first, [first_by_content[prompt.tobytes()] for prompt in new_prompts])
        places = places_of_prompts[prompts_of_rows - first_prompt]
        if self.returns_routes:
            by_prompt = self.network.routes()
            by_prompt = by_prompt.reshape(len(first), width, *by_prompt.shape[1:])
            self.prompt_routes |= {
                first_prompt + index: by_prompt[place, width - len(prompt) :]
                for index, (place, prompt) in enumerate(zip(places_of_prompts, new_prompts, strict=True))
            }
        self.started += count
        if not has_running:
            self.running = rows
            self.places = places
            self.cache = cache
            self.mask = mask
            self.logits = logits
            return
        assert self.mask is not None and self.logits is not None
        live, self.places = np.unique(self.places, return_inverse=True)
        self._select_places(live)
        self.logits = torch.cat([self.logits[self._to_device(live)], logits])
        self.places = np.concatenate([self.places, len(live) + places])
        self.running = np.concatenate([self.running, rows])
        before = int(self.mask.any(0).int().argmax())  # padding that all remaining places share
        own_mask = self.mask[:, before:]
        tokens = own_mask.shape[1]
        self.mask = stack_padded(own_mask, mask, 1)
        join_places(self.cache, cache, tokens, self.mask.shape[1])

    def _draw_tokens(self) -> NDArray[np.int64]:
        """Draw a token for each running response, and compute the next token's logits.

        Return the indices of the responses that end with the drawn token.
        """
        import numpy as np
        import torch

        assert self.logits is not None and self.mask is not None
        running = self.running
        steps = self.begun[running] + self.lengths[running]
        row_logits = self.logits[self._to_device(self.places)]
        token, logp = self.network.draw(row_logits, self.keys[running], steps, self.sampling.select(running))
        self.tokens[running, self.lengths[running]] = token
        self.logps[running, self.lengths[running]] = logp
        self.lengths[running] += 1
        continuing = ~np.isin(token, self.sampling.ends) & (self.lengths[running] < self.room[running])
        if self.stops is not None:
            continuing[continuing] = ~self.stops([self._join_text(row) for row in running[continuing]])
        ended: NDArray[np.int64] = running[~continuing]
        self.running = running[continuing]
        places = self.places[continuing]
        token = token[continuing]
        if not len(self.running):
            self.cache = self.mask = self.logits = None
            self.places = places
            return ended
        vocabulary = self.logits.shape[-1]
        distinct, place_of_row = np.unique(places * vocabulary + token, return_inverse=True)
        parent, token = np.divmod(distinct, vocabulary)
        if len(np.unique(parent)) == len(parent) and len(parent) * 2 > len(self.logits):
            # No place is split, and few places have ended: computing the ended places, too, is cheaper than copying the
            # cache.
            inputs = np.zeros(len(self.logits), np.int64)
            inputs[parent] = token
            self.places = places
        else:
            inputs = token
            self.places = place_of_row
            self._select_places(parent)
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(inputs), 1)], 1)
        position = self.mask.sum(1, keepdim=True) - 1
        self.logits = self.network.logits(self._to_device(inputs)[:, None], self.mask, position, self.cache)
        if self.returns_routes:
            self._keep_routes(self.network.routes())
        return ended

    def _join_text(self, row: int) -> NDArray[np.int32]:
        """Return the tokens whose text is searched for the stop strings of a response.

        The result has the last tokens of the prompt, followed by all tokens drawn for the response `row`.
        `Sampling.joined` states how many of the prompt's tokens are searched.
        """
        return join_response(
            self.prompts[row // self.samples_per_prompt], self.joined[row], self.tokens[row, : self.lengths[row]]
        )

    def _select_places(self, places: NDArray[np.int64]) -> None:
        """Keep only the sequences at `places` in the KV cache and the mask.

        A place is an index in the batch dimension. Afterwards the sequences are in the order of `places`. A sequence
        whose place occurs more than once in `places` is copied.
        """
        assert self.mask is not None
        chosen = self._to_device(places)
        select_places(self.cache, chosen)
        self.mask = self.mask[chosen]

    def _to_device(self, array: NDArray[Any]) -> torch.Tensor:
        import torch

        return torch.from_numpy(array).to(self.network.place, non_blocking=True)
