"""Continuous batching of the light generator: sequences that end leave their places to the next at once.

Invariant: what is drawn for a row does not depend on who is beside it. A batch has one place for all rows that have
drawn alike so far; prompts are padded at the left, so that all places end at one column of the cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from ..spec import Response, Sampling
from .stops import Stops, joined

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

# The next sequences begin when so many of the places are free, or the last ones fit: to take some in, the whole cache
# is copied.
FREE = 1 / 4


class Network(Protocol):
    """What a batch needs of its engine."""

    place: torch.device

    def cache(self) -> Any:
        """An empty one."""

    def logits(self, ids: torch.Tensor, mask: torch.Tensor, position: torch.Tensor, cache: Any) -> torch.Tensor:
        """Of each sequence's next token, [sequences, vocabulary] in float32; `ids` [sequences, tokens] are put into the
        cache."""

    def draw(
        self, logits: torch.Tensor, keys: NDArray[np.uint64], steps: NDArray[np.int64], sampling: Sampling
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """A token for each row, and its log-probability."""


class SequenceBatch:
    """The responses to some prompts: `keys` has one for each, equally many to each prompt, and `begun` says how many of
    its tokens are in the prompt already. At most `slots` rows are under way at once, at least those of one prompt.
    `stops` looks for the strings that end a response."""

    def __init__(
        self,
        network: Network,
        prompts: list[NDArray[np.int32]],
        keys: NDArray[np.uint64],
        begun: NDArray[np.int64],
        sampling: Sampling,
        slots: int,
        stops: Stops | None,
    ) -> None:
        import numpy as np

        self.network = network
        self.prompts = prompts
        self.keys = keys
        self.begun = begun
        self.each = len(keys) // len(prompts)
        self.room = sampling.max_tokens - begun
        self.joined = np.broadcast_to(sampling.joined, len(keys))
        self.sampling, self.slots, self.stops = sampling, max(slots, self.each), stops
        self.tokens = np.zeros((len(keys), self.room.max()), np.int32)
        self.logps = np.zeros((len(keys), self.room.max()), np.float32)
        self.lengths = np.zeros(len(keys), np.int64)
        self.given = np.zeros(len(keys), np.int64)  # of each, the tokens that were told
        self.taken = 0  # prompts that have begun
        self.running = np.zeros(0, np.int64)  # rows
        self.at = np.zeros(0, np.int64)  # of each running row its place in the batch, which these are of:
        self.logits: torch.Tensor | None = None
        self.mask: torch.Tensor | None = None
        self.cache: Any = None

    def step(self) -> list[Response]:
        """One more token for all rows under way, after those that can have begun: the responses that end with it."""
        self._take_in()
        return self._told(self._draw(), True)

    def parts(self) -> list[Response]:
        """What has been drawn of the responses under way and was not told."""
        return self._told(self.running, False)

    def _told(self, rows: NDArray[np.int64], ended: bool) -> list[Response]:
        new = [(int(i), slice(self.given[i], self.lengths[i])) for i in rows]
        self.given[rows] = self.lengths[rows]
        return [Response(i, self.tokens[i, some].copy(), self.logps[i, some].copy(), ended) for i, some in new]

    @property
    def left(self) -> bool:
        """Whether some response has not ended."""
        return bool(len(self.running)) or self.taken < len(self.prompts)

    def _take_in(self) -> None:
        """Computes the next prompts, each once, and puts them beside what is under way."""
        import numpy as np
        import torch

        left = len(self.prompts) - self.taken
        under_way = len(self.running) > 0
        count = min((self.slots - len(self.running)) // self.each, left)
        if not count or (under_way and (count < min(left, FREE * self.slots / self.each) or self._slides)):
            return
        given = self.prompts[self.taken : self.taken + count]
        alike = {prompt.tobytes(): i for i, prompt in reversed([*enumerate(given)])}
        first = sorted(alike.values())
        width = max(len(given[i]) for i in first)
        ids = torch.zeros(len(first), width, dtype=torch.long)
        mask = torch.zeros(len(first), width, dtype=torch.long)
        for row, i in enumerate(first):
            ids[row, width - len(given[i]) :] = torch.from_numpy(given[i].astype(np.int64))
            mask[row, width - len(given[i]) :] = 1
        place = self.network.place
        cache = self.network.cache()
        ids = ids.to(place, non_blocking=True)
        mask = mask.to(place, non_blocking=True)
        logits = self.network.logits(ids, mask, (mask.cumsum(1) - 1).clamp(min=0), cache)
        at = np.repeat(np.searchsorted(first, [alike[p.tobytes()] for p in given]), self.each)
        rows = np.arange(self.taken * self.each, (self.taken + count) * self.each)
        self.taken += count
        if not under_way:
            self.running = rows
            self.at = at
            self.cache = cache
            self.mask = mask
            self.logits = logits
            return
        assert self.mask is not None and self.logits is not None
        live, self.at = np.unique(self.at, return_inverse=True)
        self._keep(live)
        self.logits = torch.cat([self.logits[self._here(live)], logits])
        self.at = np.concatenate([self.at, len(live) + at])
        self.running = np.concatenate([self.running, rows])
        before = int(self.mask.any(0).int().argmax())  # padding of every place that is left
        self.mask = _joined(self.mask[:, before:], mask, 1)
        for mine, new in zip(self.cache.layers, cache.layers, strict=True):
            mine.keys = _joined(mine.keys[:, :, before:], new.keys, 2)
            mine.values = _joined(mine.values[:, :, before:], new.values, 2)
            new.keys = new.values = None  # layer by layer, so that all is there twice at no moment

    def _draw(self) -> NDArray[np.int64]:
        """Draws for all rows under way, and computes what comes after: the rows that have ended."""
        import numpy as np
        import torch

        assert self.logits is not None and self.mask is not None
        running = self.running
        steps = self.begun[running] + self.lengths[running]
        drawn = self.logits[self._here(self.at)]
        token, logp = self.network.draw(drawn, self.keys[running], steps, self.sampling.of(running))
        self.tokens[running, self.lengths[running]] = token
        self.logps[running, self.lengths[running]] = logp
        self.lengths[running] += 1
        going = ~np.isin(token, self.sampling.ends) & (self.lengths[running] < self.room[running])
        if self.stops is not None:
            going[going] = ~self.stops([self._text(i) for i in running[going]])
        ended: NDArray[np.int64] = running[~going]
        self.running = running[going]
        at = self.at[going]
        token = token[going]
        if not len(self.running):
            self.cache = self.mask = self.logits = None
            self.at = at
            return ended
        vocabulary = self.logits.shape[-1]
        distinct, which = np.unique(at * vocabulary + token, return_inverse=True)
        parent, token = np.divmod(distinct, vocabulary)
        if len(np.unique(parent)) == len(parent) and len(parent) * 2 > len(self.logits):
            # Nothing parts, and little has ended: to carry that along takes less than to copy the cache.
            fed = np.zeros(len(self.logits), np.int64)
            fed[parent] = token
            self.at = at
        else:
            fed = token
            self.at = which
            self._keep(parent)
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(fed), 1)], 1)
        position = self.mask.sum(1, keepdim=True) - 1
        self.logits = self.network.logits(self._here(fed)[:, None], self.mask, position, self.cache)
        return ended

    def _text(self, row: int) -> NDArray[np.int32]:
        """The tokens that stop strings of a row are looked for in."""
        return joined(self.prompts[row // self.each], self.joined[row], self.tokens[row, : self.lengths[row]])

    @property
    def _slides(self) -> bool:
        """Whether some layer's cache holds the last tokens alone: caches of two widths do not fit together then."""
        return any(layer.is_sliding for layer in self.cache.layers)

    def _keep(self, places: NDArray[np.int64]) -> None:
        """Leaves these places, in this order, some perhaps more than once."""
        assert self.mask is not None
        chosen = self._here(places)
        self.cache.batch_select_indices(chosen)
        self.mask = self.mask[chosen]

    def _here(self, given: NDArray[Any]) -> torch.Tensor:
        import torch

        return torch.from_numpy(given).to(self.network.place, non_blocking=True)


def _joined(mine: torch.Tensor, new: torch.Tensor, dim: int) -> torch.Tensor:
    """One under the other, padded at the beginning of `dim` to one width."""
    import torch

    width = max(mine.shape[dim], new.shape[dim])

    def padded(x: torch.Tensor) -> list[torch.Tensor]:
        shape = list(x.shape)
        shape[dim] = width - shape[dim]
        return [torch.cat([x.new_zeros(shape), x], dim)] if shape[dim] else [x]

    return torch.cat(padded(mine) + padded(new))
