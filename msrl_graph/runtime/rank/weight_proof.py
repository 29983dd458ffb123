"""The proof that weights arrived and that the generation computes with them.

After each resharding (a *delivery* of weights), a generation rank must hold the weights that the update sent, and must
compute with them what the trainer computes.

Invariant: every delivery compares digests of all tensors that the generation engine holds once its method `filled` has
run. Some deliveries also have a *probe*: trainer and generator compute log-probabilities of the next token after a few
fixed prompts, and the results must agree. A probe finds errors that a digest cannot find: caches of old weights, copies
in another form, or an engine that computes differently. A difference ends the run with an error that names tensor,
rank, version and edge.

The first two deliveries after a start have a probe. Later deliveries have a probe as long as all proofs, including one
more probe, take at most the fraction SHARE of the run's time. At least one of PROBE_EVERY deliveries has a probe. One
rank of the update decides for all ranks whether the next delivery has a probe.
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import distributed as dist

from ... import noise
from ...backends import ENGINES, hf_modules
from ...backends.engine_protocols import (
    ForwardRequest,
    GenerateRequest,
    Generator,
    Sampling,
    Shard,
    Trainer,
    collect_responses,
)
from ...backends.spec import EngineSpec
from ...cost import holdings
from ...cost.holdings import PROBES as PROMPTS
from ...ir.graph import Node
from ...ir.resharding_plan import Reshard
from ...ir.workload import micro_batches
from ...model.lora import is_adapter
from ...sharding.layout import Side
from ..data.columns import ragged
from ..data.numerics import TOLERANCE
from ..process.task_report import WeightsNotDelivered
from ..weights.delivery_check import Delivery, boxes_by_name, describe_mismatch
from ..weights.digest import WIDTH, Digest
from .context import RankContext
from .micro_batches import pack

SHARE = 0.01  # the fraction of the run's time up to which deliveries are probed more often than PROBE_EVERY requires
PROBE_EVERY = 100  # of so many deliveries in a row, at least one is probed, even if the proof then takes more time
BEST = 8  # likeliest tokens that the trainer reports for each prompt
# The number of elements that are summed at a time: on a host as many as fit into the caches, on a device enough for
# efficient kernels. The buffer has at most the bytes of a bucket, whose memory is free at that time, or the fraction
# PART of the weights' bytes: an edge that moves nothing has no bucket.
AT_ONCE = {"host": 1 << 18, "device": 1 << 22}
PART = 1 / 128
LEAST = 1 << 12
GREEDY = Sampling(samples=1, max_tokens=1, temperature=1.0, top_p=1.0, top_k=1)
UNIT = 2.0**32  # log-probabilities are sent as integer multiples of 1 / UNIT
VERSION, NEXT, PROBED, FACTS = range(4)  # positions in the word after the digests; FACTS is their count


class WeightProof:
    """The proof for one resharding edge on one rank.

    - `team`: the process group of the update's ranks.
    - `word`: the tensor with the reports of the update's ranks. The reports contain the digests, the version, whether
      this delivery has a probe, and whether the next delivery has a probe. For each prompt of a probe, the reports also
      contain the likeliest next tokens and their log-probabilities.
    """

    def __init__(self, context: RankContext, edge: Reshard, sides: tuple[Side, Side], trainer: Trainer | None) -> None:
        """Make the process group of the update's ranks; a collective of all ranks."""
        self.context = context
        plan = self.plan = context.plan
        device = context.device
        # This rank's numbers in the two layouts; -1: it is not in the layout.
        src_end, dst_end = (context.local if context.is_here(node) else -1 for node in (edge.src, edge.dst))
        members = [sides[0].device(index, context.per_host) for index in range(sides[0].devices)]
        self.team = dist.new_group(members) if len(members) > 1 else None
        self.edge = edge
        self.trainer = trainer
        self.generator: Generator | None = None  # set once all engines are built
        self.model = plan.model(edge.src)
        kinds = [holdings.dtype(plan, name) for name in (edge.src, edge.dst)]
        self.tolerance = max(TOLERANCE[kind] for kind in kinds)
        weights = min(holdings.weights(plan, ENGINES, node) for node in (edge.src, edge.dst))
        most = min(AT_ONCE[device.kind.where], max(LEAST, edge.bucket_bytes // WIDTH, int(PART * weights) // WIDTH))
        dtype = getattr(torch, hf_modules.DTYPES[kinds[1]])
        digest = Digest([tensor.shape for tensor in self.model.weights], dtype, device.place, most)
        self.delivery = Delivery(self.model.weights, sides, (src_end, dst_end), digest)
        self.best = min(BEST, self.model.vocabulary)
        self.word = torch.zeros(self.delivery.size + FACTS + 2 * PROMPTS * self.best, dtype=torch.int64)
        self.version = -1  # the version in the word
        self.due = True  # whether the word is to have a probe
        self.before: tuple[int, torch.Tensor] | None = None  # the last version that this rank held, and its digests
        self.digests: dict[str, int] = {}
        # The last version of an adapter, its digests, and those of the weights that it was merged into.
        self.merged: tuple[int, dict[str, int], dict[str, int]] | None = None
        self.unprobed = False  # whether the word has a probe that the generator has not answered
        self.settled = True  # whether the word has the reports of all ranks
        self.summed: dist.Work | None = None  # the all-reduce of the ranks' reports
        self.since = 0  # deliveries since the last probe
        # When the measured time began, and the seconds that the proof took since. The slower first passes do not count.
        self.began = self.spent = 0.0
        self.probing = 0.0  # seconds of `spent` that the last probe took
        self.answered = False  # whether the generator has answered its first probe

    # The update's ranks.

    def send(self, version: int, again: bool = True) -> None:
        """Write the digests of this update rank's weights into the tensor `word`.

        If this delivery of weights has a probe (a comparison of log-probabilities on fixed prompts), the trainer's
        results are also written. `version` is the version of the weights. All ranks of the update call this method. If
        `again` is false, a second call for the same version does nothing.
        """
        if self.trainer is None or (version == self.version and not again):
            return
        with self._timed():
            self.version = version
            self.since = 0 if self.due else self.since + 1
            self.word.zero_()
            self.word[: self.delivery.size] = self.delivery.sent_digests(self.trainer.shards())
        reports = self.context.is_leader(self.plan.graph.node(self.edge.src))
        if self.due:
            self.probing = 0.0
            with self._timed(probes=True):
                self._request_probe(self.trainer, reports)
        if reports:
            facts = self._facts()
            facts[VERSION] = version
            facts[NEXT] = int(self._affords())
        if self.team is not None:  # runs while the weights are sent
            self.summed = dist.all_reduce(self.word, group=self.team, async_op=True)
        self.settled = False

    def settle(self) -> None:
        """Wait until `word`, the report tensor, contains the reports of all update ranks."""
        if self.trainer is None or self.settled:
            return
        with self._timed():
            if self.summed is not None:
                self.summed.wait()
        self.settled = True
        self.due = bool(self._facts()[NEXT])
        if not self.began:
            self._restart_clock()

    def _restart_clock(self) -> None:
        self.began = time.perf_counter()
        self.spent = 0.0

    def _affords(self) -> bool:
        """Return whether the next delivery has a probe, by the rule in the module's text."""
        if not self.began:
            return True  # the second delivery: a probe then finds a cache of the first delivery's weights
        return self.spent + self.probing <= SHARE * (time.perf_counter() - self.began) or self.since + 1 >= PROBE_EVERY

    def _request_probe(self, trainer: Trainer, reports: bool) -> None:
        """Let the trainer compute the likeliest next tokens after each prompt of a probe.

        All ranks of the update make the same calls. The rank for which `reports` is true writes the result into `word`.
        """
        prompts = ragged(self._prompts(), np.int32)
        nothing = ragged([np.zeros(1, np.int32)] * PROMPTS, np.int32)  # a placeholder for the predicted token
        layout = self.plan.placement(self.edge.src).layout
        rows = np.array_split(np.arange(PROMPTS), micro_batches(PROMPTS, PROMPTS, layout))
        request = ForwardRequest(best=self.best, node=self.plan.graph.node(self.edge.src))
        outputs = trainer.score([pack([prompts], [nothing], positions) for positions in rows], request)
        if not reports or any(output.best is None or output.ids is None for output in outputs):
            return
        ids = torch.cat([output.ids for output in outputs if output.ids is not None]).cpu()
        logps = torch.cat([output.best for output in outputs if output.best is not None]).cpu()
        if not logps.isfinite().all():  # the nodes that compute rows with these weights report the error
            return
        facts = self._facts()
        facts[PROBED] = 1
        facts[FACTS:] = torch.cat([ids.flatten(), (logps.double() * UNIT).round().long().flatten()])

    # The generation's ranks.

    def check_bound(self, shards: Sequence[Shard]) -> None:
        """End the run if the generation engine lacks tensors that its layout declares.

        The run also ends if a tensor is not in the layout, or has another box than in the layout.
        """
        self.digests = {}
        declared = {name: part.box for name, part in self.delivery.declared.items()}
        if self.trainer is None:
            self.word.fill_(-1)  # so that `check` notices if no word arrives
        if wrong := describe_mismatch(declared, shards):
            raise WeightsNotDelivered(f"{self._describe_place()}: its engine has {wrong}")

    def digest_changing(self, shards: Sequence[Shard], adapted: Container[str]) -> None:
        """Compute digests of the tensors that will change in place.

        All weights have arrived. An adapter is merged into the weights `adapted`, and an engine that packs experts
        converts them.
        """
        packs = self._spec().sharding.packs_experts
        experts = {tensor.name for tensor in self.model.weights if packs and tensor.experts}
        changing = {tensor.name for tensor in self.model.weights if tensor.name in experts or tensor.name in adapted}
        if changing:
            with self._timed():
                self.digests = self.delivery.held_digests([shard for shard in shards if shard.name in changing])

    def check_merged(self, version: int, shards: Sequence[Shard], adapted: Container[str]) -> None:
        """End the run if a new version of an adapter has changed none of its weights.

        `adapted` are the names of these weights. The engine has not converted them yet.
        """
        with self._timed():
            adapter = self.delivery.current_digests([shard for shard in shards if is_adapter(shard.name)])
            merged = self.delivery.current_digests([shard for shard in shards if shard.name in adapted])
        before = self.merged
        self.merged = version, adapter, merged
        if before is not None and adapter != before[1] and merged == before[2]:
            raise WeightsNotDelivered(
                f"{self._describe_place()}: it holds version {version} of the adapter, but the weights that it "
                f"generates with are those of version {before[0]}: the adapter is not bound to the model"
            )

    def check(self, version: int, shards: Sequence[Shard]) -> None:
        """End the run if this rank does not hold the weights that the update sent.

        `version` is the version that this rank expects.
        """
        self.settle()
        with self._timed():
            facts = self._facts()
            sent = self.word[: self.delivery.size].clone()
            received = int(facts[VERSION])
            if received != version:
                other = f"version {received}" if received >= 0 else "nothing"
                raise WeightsNotDelivered(
                    f"{self._describe_place()}: it expected version {version} of the weights and received {other}"
                )
            self.digests |= self.delivery.held_digests([shard for shard in shards if shard.name not in self.digests])
            if wrong := self.delivery.find_differences(self.digests, sent):
                raise WeightsNotDelivered(f"{self._describe_place()}: {self._explain_difference(version, wrong)}")
            self.before = (version, sent)
            self.unprobed = bool(facts[PROBED])

    def _explain_difference(self, version: int, wrong: Sequence[str]) -> str:
        first = wrong[0]
        count = len(self.delivery.declared)
        text = f"`{first}` differs from version {version} of `{self.edge.src}`"
        if self.before is not None and first not in self.delivery.find_differences(self.digests, self.before[1]):
            text += f" and equals version {self.before[0]}"
        return f"{text} ({len(wrong)} of {count} tensors differ)"

    def probe(self) -> None:
        """End the run if the generator's log-probabilities differ from the trainer's.

        All ranks of the generator's group call this method when their field `unprobed` is true.
        """
        assert self.generator is not None
        self.unprobed = False
        with self._timed(probes=True):
            facts = self._facts()
            ids, logps = facts[FACTS:].view(2, PROMPTS, self.best).numpy()
            request = GenerateRequest(self._prompts(), np.arange(PROMPTS, dtype=np.uint64), GREEDY)
            tokens, drawn = collect_responses(self.generator.generate(request))
            layout = self.plan.placement(self.edge.dst).layout
            errors = []
            # Only the ranks with the last layers have log-probabilities.
            if layout.coordinates(self.context.local).pp != layout.pp - 1:
                return
            for prompt, (token, logp) in enumerate(zip(tokens, drawn, strict=True)):
                place = np.flatnonzero(ids[prompt] == token[0])
                if not len(place):
                    expected = logps[prompt] / UNIT
                    alike = (
                        expected[0] - expected[-1] <= self.tolerance and abs(logp[0] - expected[0]) <= self.tolerance
                    )
                    # Of several equally likely tokens, the trainer may have reported others than the generator drew.
                    if alike or not self._draws_likeliest():
                        continue
                    difference = f"it draws token {token[0]}, which is not one of the trainer's {self.best} likeliest"
                    raise WeightsNotDelivered(
                        f"{self._describe_place()}: {self._explain_computation(prompt, difference)}"
                    )
                errors.append(abs(float(logp[0]) - logps[prompt, place[0]] / UNIT))
        if not self.answered:
            self.answered = True
            self._restart_clock()
        if errors and not np.mean(errors) <= self.tolerance:
            difference = (
                f"the likeliest token's log-probability is off by {np.mean(errors):.3g} nats on average over "
                f"{len(errors)} prompts; rounding explains at most {self.tolerance:g}"
            )
            raise WeightsNotDelivered(f"{self._describe_place()}: {self._explain_computation(-1, difference)}")

    def _explain_computation(self, prompt: int, difference: str) -> str:
        version = int(self._facts()[VERSION])
        after = f" after probe {prompt}" if prompt >= 0 else ""
        way_out = suggest_other_kernels(self.edge.dst, self.plan.placement(self.edge.dst).engine.name)
        return (
            f"it holds version {version} of the weights, but does not compute what `{self.edge.src}` computes{after}: "
            f"{difference}. Either `filled` leaves a cache of old weights or a copy in another form, or a kernel of "
            f"the engine computes this model differently{way_out}"
        )

    # Both.

    def _prompts(self) -> list[np.ndarray[Any, np.dtype[np.int32]]]:
        """Return the prompts of the probe, which are the same on all ranks at all times.

        An engine may wrongly keep a cache that it computed with older weights. Because the prompts never change, such
        an engine uses the cache and gives a wrong result, which the probe detects. The prompts are long enough to be
        cached, if the maximal lengths in the program permit it.
        """
        length = holdings.probe_tokens(self.plan, ENGINES, self.edge.src, self.edge.dst)
        stream = noise.RandomStream(self.plan.deploy.run.seed, "probe", self.edge.name)
        keys = stream.keys(np.arange(PROMPTS)[:, None], np.arange(length))
        return [*(keys % np.uint64(self.model.vocabulary)).astype(np.int32)]

    def _facts(self) -> torch.Tensor:
        return self.word[self.delivery.size :]

    def _spec(self) -> EngineSpec:
        return ENGINES[self.plan.placement(self.edge.dst).engine.name]

    def _draws_likeliest(self) -> bool:
        return self._spec().capabilities.supports("generate", "top_k")

    def _describe_place(self) -> str:
        edge = next(e for e in self.plan.graph.reshards() if (e.src, e.dst) == (self.edge.src, self.edge.dst))
        return f"`{self.edge.name}` ({edge.span.place}) on rank {self.context.rank}"

    @contextmanager
    def _timed(self, probes: bool = False) -> Iterator[None]:
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self.spent += seconds
        self.probing += seconds if probes else 0.0


def suggest_other_kernels(node: str, engine: str) -> str:
    """Return advice for a message: how to generate without an engine's own kernels."""
    return "" if engine == "hf" else f"; `engine {node} = hf` uses torch's own kernels"


def check_complete(context: RankContext, node: Node, shards: Sequence[Shard]) -> None:
    """End the run if a new engine lacks tensors that its layout declares.

    The run also ends if a tensor is not in the layout, or has another box than in the layout.
    """
    placement = context.plan.placement(node.name)
    side = ENGINES[placement.engine.name].side(placement.layout)
    if wrong := describe_mismatch(boxes_by_name(context.plan.model(node.name).weights, side, context.local), shards):
        subject = f"`{node.name}` ({node.span.place}), engine {placement.engine.name}"
        raise WeightsNotDelivered(f"{subject}: rank {context.local} of its layout has {wrong}")
