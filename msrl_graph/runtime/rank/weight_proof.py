"""The proof that weights arrived: after each resharding a generation rank holds what the update sent, and computes with
it what the trainer computes.

Invariant: digests of all tensors are compared at every delivery, of what the engine holds after `filled`. A probe, a
few fixed prompts whose next tokens trainer and generator must give the same log-probability, is made at the first two
deliveries after a start, and then as often as all of the proof, with one more, takes at most SHARE of the time, but at
least at one of OFTEN; whether the next one has it, one rank of the update decides for all. It sees what no digest does:
caches of old weights, copies in another form, an engine that computes something else. What differs ends the run, with
tensor, rank, version and edge.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import distributed as dist

from ... import noise
from ...backends import ENGINES, hf_modules
from ...backends.devices import TorchDevice
from ...backends.spec import EngineSpec, ForwardRequest, Generator, Sampling, Shard, Trainer, collected
from ...cost import holdings
from ...cost.holdings import PROBES as PROMPTS
from ...ir.graph import Node
from ...ir.plan import Placement, Plan, Reshard
from ...ir.workload import micro_batches
from ...sharding.layout import Side
from ..data.columns import ragged
from ..data.numerics import TOLERANCE
from ..process.task_report import WeightsNotDelivered
from ..weights.delivery_check import Delivery, boxes, unbound
from ..weights.digest import WIDTH, Digest
from .micro_batches import MicroBatches, pack

SHARE = 0.01  # of the time that a run takes: as far as the proof takes less, deliveries are probed too
OFTEN = 100  # and of so many in a row one is, whatever it takes
BEST = 8  # likeliest tokens that the trainer tells of each prompt
# Elements that are summed at once: on a host what its caches hold, on a device enough for its kernels, and never more
# than the bucket has that is not there at the time.
AT_ONCE = {"host": 1 << 16, "device": 1 << 22}
LEAST = 1 << 12
UNIT = 2.0**32  # log-probabilities go as whole numbers of its inverse
VERSION, NEXT, PROBED, FACTS = range(4)  # what a word says after the digests: the last is how many these are


class WeightProof:
    """Of one resharding edge on one rank, the number `ends` of the two layouts (-1: of none). `team` is the group of
    the update's ranks. `word` is what they say: digests, the version, whether the next delivery has a probe, whether
    this one does, and of each of its prompts the likeliest next tokens and their log-probabilities."""

    def __init__(
        self,
        plan: Plan,
        edge: Reshard,
        device: TorchDevice,
        sides: tuple[Side, Side],
        ends: tuple[int, int],
        team: Any,
        trainer: Trainer | None,
    ) -> None:
        self.plan = plan
        self.edge = edge
        self.ends = ends
        self.team = team
        self.trainer = trainer
        self.generator: Generator | None = None  # which may be built later
        self.model = plan.model(edge.src)
        self.source = plan.placement(edge.src)
        kinds = [holdings.dtype(plan, n) for n in (edge.src, edge.dst)]
        self.tolerance = max(TOLERANCE[kind] for kind in kinds)
        most = min(AT_ONCE[device.kind.where], max(LEAST, edge.bucket_bytes // WIDTH))
        dtype = getattr(torch, hf_modules.DTYPES[kinds[1]])
        digest = Digest([t.shape for t in self.model.tensors], dtype, device.place, most)
        self.delivery = Delivery(self.model.tensors, sides, ends, digest)
        self.best = min(BEST, self.model.vocabulary)
        self.word = torch.zeros(self.delivery.size + FACTS + 2 * PROMPTS * self.best, dtype=torch.int64)
        self.version, self.due = -1, True  # of the word; whether it is to have a probe
        self.before: tuple[int, torch.Tensor] | None = None  # the last version that this rank held, and its digests
        self.held: dict[str, int] = {}
        self.unprobed = False  # whether the word has a probe that the generator has not answered
        self.said = True  # whether the word is that of all ranks
        self.summed: dist.Work | None = None  # what brings together what they say
        self.since = 0  # deliveries since the last probe
        self.began = self.spent = 0.0  # of the time that counts, without what only first passes take
        self.probing = 0.0  # of what is spent, the last probe
        self.answered = False  # whether the generator has made its first

    # The update's ranks.

    def send(self, version: int, again: bool = True) -> None:
        """Has this rank of the update say what it knows of its weights, which are of this version; not `again` where it
        has. All of them call it."""
        if self.trainer is None or (version == self.version and not again):
            return
        with self._counted():
            self.version = version
            self.since = 0 if self.due else self.since + 1
            self.word.zero_()
            self.word[: self.delivery.size] = self.delivery.sent(self.trainer.shards())
        tells = self._tells()
        if self.due:
            self.probing = 0.0
            with self._counted(probes=True):
                self._ask(self.trainer, tells)
        if tells:
            facts = self._facts()
            facts[VERSION] = version
            facts[NEXT] = int(self._affords())
        if self.team is not None:  # while the weights go
            self.summed = dist.all_reduce(self.word, group=self.team, async_op=True)
        self.said = False

    def settle(self) -> None:
        """Waits until the word is what all ranks of the update have said."""
        if self.trainer is None or self.said:
            return
        with self._counted():
            if self.summed is not None:
                self.summed.wait()
        self.said = True
        self.due = bool(self._facts()[NEXT])
        if not self.began:
            self._count()

    def _count(self) -> None:
        self.began = time.perf_counter()
        self.spent = 0.0

    def _affords(self) -> bool:
        """Whether the next delivery is to be probed."""
        if not self.began:
            return True  # the second: what is kept of the first one's weights shows in the next
        return self.spent + self.probing <= SHARE * (time.perf_counter() - self.began) or self.since + 1 >= OFTEN

    def _tells(self) -> bool:
        """Whether this rank says what all of them know: the first with a model's last layers."""
        at = self.source.layout.coordinates(self.ends[0])
        layout = self.source.layout
        return (at.tp, at.cp, at.dp, at.pp) == (0, 0, 0, layout.pp - 1)

    def _ask(self, trainer: Trainer, tells: bool) -> None:
        """Has the trainer compute the likeliest tokens after each prompt; all ranks make the same calls."""
        prompts = ragged(self._prompts(), np.int32)
        nothing = ragged([np.zeros(1, np.int32)] * PROMPTS, np.int32)  # in the place of the token that is predicted
        rows = np.array_split(np.arange(PROMPTS), micro_batches(PROMPTS, PROMPTS, self.source.layout))
        made = trainer.score(
            MicroBatches(rows, lambda some: pack([prompts], [nothing], some)),
            ForwardRequest(best=self.best, node=self.plan.graph.node(self.edge.src)),
        )
        if not tells or any(m.best is None or m.ids is None for m in made):
            return
        ids = torch.cat([m.ids for m in made if m.ids is not None]).cpu()
        logps = torch.cat([m.best for m in made if m.best is not None]).cpu()
        if not logps.isfinite().all():  # which is told by whoever computes rows with these weights
            return
        facts = self._facts()
        facts[PROBED] = 1
        facts[FACTS:] = torch.cat([ids.flatten(), (logps.double() * UNIT).round().long().flatten()])

    # The generation's ranks.

    def bound(self, shards: Sequence[Shard]) -> None:
        """Ends the run where the engine does not have the tensors that its layout declares."""
        self.held, declared = {}, {name: part.box for name, part in self.delivery.declared.items()}
        if self.trainer is None:
            self.word.fill_(-1)  # so that a word that does not come is seen
        if wrong := unbound(declared, shards):
            raise WeightsNotDelivered(f"{self._where()}: its engine has {wrong}")

    def packed(self, shards: Sequence[Shard]) -> None:
        """Looks at what the engine brings into another form when it is told that all is there."""
        if self._spec().packs_experts:
            experts = {t.name for t in self.model.tensors if t.experts}
            with self._counted():
                self.held = self.delivery.held([s for s in shards if s.name in experts])

    def check(self, version: int, shards: Sequence[Shard]) -> None:
        """Ends the run where this rank does not hold what the update sent as this version."""
        self.settle()
        with self._counted():
            facts = self._facts()
            sent = self.word[: self.delivery.size].clone()
            said = int(facts[VERSION])
            if said != version:
                other = f"version {said}" if said >= 0 else "nothing"
                raise WeightsNotDelivered(
                    f"{self._where()}: it was to get version {version} of the weights, and got {other}"
                )
            self.held |= self.delivery.held([s for s in shards if s.name not in self.held])
            if wrong := self.delivery.other(self.held, sent):
                raise WeightsNotDelivered(f"{self._where()}: {self._differs(version, wrong)}")
            self.before = (version, sent)
            self.unprobed = bool(facts[PROBED])

    def _differs(self, version: int, wrong: Sequence[str]) -> str:
        first = wrong[0]
        count = len(self.delivery.declared)
        text = f"`{first}` is not what `{self.edge.src}` has in version {version}"
        if self.before is not None and first not in self.delivery.other(self.held, self.before[1]):
            text += f", but what it had in version {self.before[0]}"
        return f"{text} ({len(wrong)} of {count} tensors differ)"

    def probe(self) -> None:
        """Ends the run where the generator gives other log-probabilities than the trainer; a call of all ranks of its
        group, each time that they are `unprobed`."""
        assert self.generator is not None
        self.unprobed = False
        with self._counted(probes=True):
            facts = self._facts()
            ids, logps = facts[FACTS:].view(2, PROMPTS, self.best).numpy()
            tokens, drawn = collected(
                self.generator.generate(self._prompts(), np.arange(PROMPTS, dtype=np.uint64), _likeliest())
            )
            layout = self.plan.placement(self.edge.dst).layout
            off = []
            if layout.coordinates(self.ends[1]).pp != layout.pp - 1:  # log-probabilities are where the last layers are
                return
            for prompt, (token, logp) in enumerate(zip(tokens, drawn, strict=True)):
                place = np.flatnonzero(ids[prompt] == token[0])
                if not len(place):
                    told = logps[prompt] / UNIT
                    alike = told[0] - told[-1] <= self.tolerance and abs(logp[0] - told[0]) <= self.tolerance
                    if alike or not self._draws_likeliest():  # of more tokens that are as likely the trainer told some
                        continue
                    what = f"it draws the token {token[0]}, none of the trainer's {self.best} likeliest"
                    raise WeightsNotDelivered(f"{self._where()}: {self._computes(prompt, what)}")
                off.append(abs(float(logp[0]) - logps[prompt, place[0]] / UNIT))
        if not self.answered:
            self.answered = True
            self._count()
        if off and not np.mean(off) <= self.tolerance:
            what = (
                f"the likeliest token's log-probability is off by {np.mean(off):.3g} nats on average over {len(off)} "
                f"prompts, where rounding makes at most {self.tolerance:g}"
            )
            raise WeightsNotDelivered(f"{self._where()}: {self._computes(-1, what)}")

    def _computes(self, prompt: int, what: str) -> str:
        version = int(self._facts()[VERSION])
        of = f" after probe {prompt}" if prompt >= 0 else ""
        way_out = other_kernels(self.edge.dst, self.plan.placement(self.edge.dst).engine.name)
        return (
            f"it holds version {version} of the weights, but computes something else than `{self.edge.src}`{of}: "
            f"{what}. Either `filled` leaves a cache of old weights or a copy in another form, or a kernel of "
            f"the engine computes this model differently{way_out}"
        )

    # Both.

    def _prompts(self) -> list[np.ndarray[Any, np.dtype[np.int32]]]:
        """The same on all ranks at all times, so that what an engine has kept of them from older weights would show; as
        long as it takes to be kept, where bounds let them."""
        length = holdings.probe_tokens(self.plan, ENGINES, self.edge.src, self.edge.dst)
        stream = noise.RandomStream(self.plan.deploy.run.seed, "probe", self.edge.name)
        keys = stream.keys(np.arange(PROMPTS)[:, None], np.arange(length))
        return [*(keys % np.uint64(self.model.vocabulary)).astype(np.int32)]

    def _facts(self) -> torch.Tensor:
        return self.word[self.delivery.size :]

    def _spec(self) -> EngineSpec:
        return ENGINES[self.plan.placement(self.edge.dst).engine.name]

    def _draws_likeliest(self) -> bool:
        honours = self._spec().honours
        return honours is None or "top_k" in honours

    def _where(self) -> str:
        edge = next(e for e in self.plan.graph.reshards() if (e.src, e.dst) == (self.edge.src, self.edge.dst))
        rank = self.plan.placement(self.edge.dst).device(self.ends[1], self.plan.cluster.devices_per_node)
        return f"`{self.edge.name}` ({edge.span.place}) on rank {rank}"

    @contextmanager
    def _counted(self, probes: bool = False) -> Iterator[None]:
        start = time.perf_counter()
        yield
        taken = time.perf_counter() - start
        self.spent += taken
        self.probing += taken if probes else 0.0


def _likeliest() -> Sampling:
    return Sampling(samples=1, max_tokens=1, temperature=1.0, top_p=1.0, top_k=1)


def other_kernels(node: str, engine: str) -> str:
    """Return how to generate without the kernels of an engine, for a message."""
    return "" if engine == "hf" else f"; `engine {node} = hf` uses torch's own kernels"


def complete(
    node: Node, placement: Placement, rank: int, side: Side, tensors: Iterable[Any], found: Sequence[Shard]
) -> None:
    """Ends the run where an engine that was built does not have the tensors that its layout declares."""
    if wrong := unbound(boxes(tensors, side, rank), found):
        what = f"`{node.name}` ({node.span.place}), engine {placement.engine.name}"
        raise WeightsNotDelivered(f"{what}, has on rank {rank} of its layout {wrong}")
