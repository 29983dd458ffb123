"""Generation by vLLM in the rank's own process (vllm-ascend on Ascend).

Invariant: the shards are views into vLLM's own parameters, so that resharding fills them box by box; parameters and
cache have memory only between `allocate` and `release`. Tokens are drawn by generation/sampling.py, not by vLLM: what
is drawn for a row is what the light engine draws, but for the rounding of logits.

On npu it has never run: none was at hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from itertools import count
from typing import TYPE_CHECKING

from ...hardware.environment_variables import Setting
from ...ir.workload import Workload
from ...sharding.layout import shard
from .. import expert_placement, hf_modules
from ..generation.segments import generate_in_segments
from ..generation.stops import join_response, load_stops
from ..spec import BYTES, Act, EngineSpec, Lint, Moments, OperatorCalls, Response, Sampling, Shard, Situation, Weights
from .core import (
    BLOCK,
    DRAWN,
    Replica,
    SampledBatch,
    TokenSampler,
    as_stated,
    block,
    cache_elements,
    cached,
    core,
    settle,
    stepped,
    views,
)
from .memory import EngineMemory, ResizedMemory, SleepingMemory

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from vllm.sampling_params import SamplingParams

    from ...ir.plan import Placement
    from ...sharding.layout import Layout
    from ..devices import Devices


def _lints(situation: Situation) -> Iterator[Lint]:
    if not situation.device.is_host and "vllm" in situation.beside:
        message = "two generations by vllm on the same devices: its allocator sleeps for one engine a process"
        yield Lint(message, "put one of them `apart`, or on devices of its own")


def _settings(situation: Situation) -> Iterator[Setting]:
    if not situation.device.plugin:
        return
    lie = "weights are written in place, and lie as they are sent"
    yield Setting("VLLM_ASCEND_ENABLE_NZ", "0", lie, "vllm-ascend, worker/worker.py", fails="[^0].*")
    graph = "no graph is captured with level 2"
    yield Setting("TASK_QUEUE_ENABLE", "1", graph, "verl, perf_tuning_on_ascend.rst", fails="2")
    waits = "graphs cannot be captured where each launch is waited for"
    yield Setting("ASCEND_LAUNCH_BLOCKING", "0", waits, "vllm-ascend, platform.py", fails="1")
    # The allocator of a vLLM that sleeps is a pool of its own, which segments that grow are not in.
    sleeps = "what sleeps gives its memory back"
    grows = ".*expandable_segments *: *True.*"
    yield Setting(
        "PYTORCH_NPU_ALLOC_CONF", "expandable_segments:False", sleeps, "Ascend/pytorch, issue 166", fails=grows
    )


def _peaks(verb: str, work: Workload) -> Moments:
    """The cache has whole blocks. vLLM has logits in float32 too; some at a time are drawn from in float64: their
    exponentials, the sums of these, and what is sorted."""
    model = work.model
    layout = work.layout
    sequences, _ = cached(work)
    tokens = stepped(work)
    heads = -(-model.heads // layout.tp) * model.head_dim
    # The residual, before and after, the states in and out; of the other half both products, as one, what becomes of
    # the first, and their product, or of experts two workspaces (TritonExperts.workspace_shapes; the kernel for the CPU
    # keeps such to itself).
    half = 4 * -(-model.intermediate // layout.tp)
    if found := model.experts:
        inner = -(-found.intermediate // layout.etp)
        spaces = found.active * (max(inner, model.hidden) + max(2 * inner, model.hidden)) + found.number
        half = max(spaces + 4 * -(-found.shared // layout.tp), half * bool(found.first))
    met = 4 * heads if model.latent else heads + 2 * model.kv_elements
    inside = 4 * model.hidden + max(met, half)
    logits = sequences * model.vocabulary
    item = BYTES[work.dtype]
    drawn = min(logits, max(DRAWN, model.vocabulary))
    cache = _cache(work)
    return {
        "a step": {**cache, "activations": tokens * inside * item},
        "a token is drawn": {**cache, "logits": logits * (item + 4 * (item < 4)) + drawn * 3 * 8},
    }


def _cache(work: Workload) -> dict[str, int]:
    _, blocks = cached(work)
    return {"KV cache": blocks * block(work) * cache_elements(work) * BYTES[work.dtype]}


def _building(work: Workload) -> dict[str, int]:
    """The whole cache, and room for prompts that come as embeddings."""
    return _cache(work) | {"embedded prompts": stepped(work) * work.model.hidden * BYTES[work.dtype]}


# What is taken beside operators, in operators that take as long, by processor time: in a layer by vLLM's own kernels
# (models of 2 and 6 layers), by the scheduler in a step for each sequence, and for each that begins, its end among it
# (256 sequences and 4, 9 steps and one, on 2 layers). A step's own part is nothing: its operators are small ones.
KERNELS = 16
SCHEDULED = 3.3
BEGUN = 13


def _calls(act: Act, layout: Layout) -> OperatorCalls:
    """Counted by torch's profiler on Qwen2 models of 2 and 6 layers; the drawing of a token is part of it."""
    return OperatorCalls(46 + KERNELS, 156 + 17 * (layout.tp > 1), BEGUN if act == "prefill" else SCHEDULED)


SPEC = EngineSpec(
    name="vllm",
    verbs=("generate",),
    axes=("tp", "pp", "dp", "ep", "etp"),
    build="msrl_graph.backends.vllm.engine:VllmEngine",
    options=("micro_batch", "dtype", "memory"),
    vocabulary_multiple=64,
    pads_whole=True,
    replicates_kv_heads=True,
    spread=expert_placement.VLLM,
    packs_experts=True,
    families=("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3"),
    off_host=("ep",),  # the kernel for the CPU does not know whose experts are whose, and ends the process
    needs=("vllm",),
    own_groups=True,
    groups=lambda layout: (layout.tp > 1) + (layout.pp > 1) + (layout.ep > 1),
    lints=_lints,
    settings=_settings,
    continuous=True,
    shares_beginnings=("host", "device"),
    calls=_calls,
    fused=("device",),
    block=BLOCK,
    peaks=_peaks,
    building=_building,
    chosen=("device",),
)


class VllmEngine:
    """A generator on this rank."""

    def __init__(self, weights: Weights, placement: Placement, devices: Devices) -> None:
        assert weights.work is not None
        self.model = weights.model
        self.generation = TokenSampler()
        self.replica = Replica(devices)
        with self.replica.as_world():
            group = self.replica.group
            self.generation.group = group if placement.layout.tp * placement.layout.pp > 1 else None
            self.core = core(weights.model, weights.work, devices, group, self.generation)
        worker = self.core.model_executor.driver_worker.worker
        runner = worker.model_runner
        kind = devices.device.kind
        self._memory: EngineMemory = (
            ResizedMemory(runner, placement.layout.pp) if kind.is_host else SleepingMemory(worker)
        )
        side = SPEC.side(placement.layout)
        boxes = {t.name: shard(t, side, devices.rank) for t in weights.model.tensors}
        named = dict(runner.model.named_parameters())
        for parameter in named.values():
            parameter.requires_grad_(False)
        as_stated(runner.model, kind.is_host)
        # What no run changes, of this stage: it sleeps with the rest.
        fixed = hf_modules.fixed(weights.model)
        self._fixed = [(named.pop(name), value) for name, value in fixed.items() if name in named]
        fused = getattr(runner.model, "packed_modules_mapping", {})
        self._shards = list(views(boxes, named, fused, turned=bool(kind.plugin)))
        # What pads the vocabulary, or a rank's part of experts: nothing fills it.
        padded = [t.name for t in weights.model.tensors if t.padded and t.name in named]
        self._padding = [named[name][boxes[name][0][1] - boxes[name][0][0] :] for name in padded]
        self._padding += [parameter for parameter in dict.fromkeys(named.values()) if parameter.ndim == 3]
        self.module = runner.model
        self.runner = runner
        self.turned = bool(kind.plugin)
        self.longest = weights.work.prompt + weights.work.response  # tokens of a sequence
        if kind.groups_beside_sleep:
            self.release()

    def allocate(self) -> list[Shard]:
        self._memory.weights()
        for rows in self._padding:
            rows.zero_()
        for parameter, value in self._fixed:
            parameter.copy_(value)
        return self._shards

    def filled(self) -> None:
        settle(self.module, self.runner.model_config.dtype, self.turned)
        self._forget_prefixes()

    def _forget_prefixes(self) -> None:
        if not self.core.reset_prefix_cache():
            raise RuntimeError("a generation is under way")

    def release(self) -> None:
        self._forget_prefixes()
        self._memory.give()

    def generate(
        self,
        prompts: list[NDArray[np.int32]],
        keys: NDArray[np.uint64],
        sampling: Sampling,
        begun: NDArray[np.int64] | None = None,
        stretch: int = 0,
    ) -> Iterator[Response]:
        import numpy as np

        begun = np.zeros(len(keys), np.int64) if begun is None else begun
        if stretch:  # of what is under way the whole blocks of the cache are still there
            stops = load_stops(self.model.path, sampling.stop) if sampling.stop else None
            yield from generate_in_segments(self.generate, prompts, keys, sampling, begun, stretch, stops)
            return

        self._memory.cache()
        each = len(keys) // len(prompts)
        room = sampling.max_tokens - begun
        drawn = self.generation.call = SampledBatch(keys, begun, room, sampling)
        self._prompts = [prompts[i // each] for i in range(len(keys))]
        self._params: dict[int, SamplingParams] = {}
        self._running: set[str] = set()
        self._numbers = count()
        alike: dict[bytes, list[int]] = {}
        for i, prompt in enumerate(self._prompts):
            alike.setdefault(prompt.tobytes(), []).append(i)
        try:
            with self._at_work():
                for some in alike.values():
                    self._add(np.array(some))
            while self._running:
                with self._at_work():
                    ended = self._step()
                for i in ended.tolist():
                    end = drawn.lengths[i]
                    yield Response(i, drawn.tokens[i, :end].copy(), drawn.logps[i, :end].copy())
        finally:
            with self._at_work():
                self.core.abort_requests(list(self._running))  # none, unless a step raised or no more was asked for

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Not while others compute between two steps."""
        import torch

        with torch.inference_mode(), self.replica.shown():
            yield

    def _add(self, rows: NDArray[np.int64]) -> None:
        """A request for rows that have the same tokens so far."""
        import numpy as np
        from vllm.sampling_params import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        drawn = self.generation.call
        number = next(self._numbers)
        length = int(drawn.lengths[rows[0]])
        tokens = np.concatenate([self._prompts[rows[0]], drawn.tokens[rows[0], :length]])
        room = int(drawn.room[rows].max()) - length
        if len(tokens) + room > self.longest:
            what = f"a prompt of {len(tokens)} tokens and {room} more"
            raise ValueError(f"{what} are over the {self.longest} that it was built for")
        if room not in self._params:
            self._params[room] = SamplingParams(
                temperature=0.0,
                max_tokens=room,
                stop_token_ids=list(drawn.sampling.ends),
                ignore_eos=True,
                detokenize=False,
            )
        params = copy(self._params[room])  # which takes less than to make one
        params.extra_args = {"number": number}
        request = EngineCoreRequest(
            request_id=str(number),
            prompt_token_ids=tokens.tolist(),
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        drawn.alike[number] = rows
        self._running.add(request.request_id)
        self.core.add_request(*self.core.preprocess_add_request(request))

    def _step(self) -> NDArray[np.int64]:
        """Computes one more token of the requests that the scheduler chooses: the rows that end with it. Rows of a
        request that draw another token than the one that it goes on with get a request of their own, whose cache begins
        with the whole blocks that they share; a request without rows ends."""
        import numpy as np

        drawn = self.generation.call
        found, ran = self.core.step_fn()
        self.core.post_step(ran)
        outputs = [o for o in (found[0].outputs if found and 0 in found else ()) if o.new_token_ids]
        if not outputs:
            return np.zeros(0, np.int64)
        numbers = [int(o.request_id) for o in outputs]
        rows, of = drawn.each(numbers)
        drawn.lengths[rows] += 1
        tokens = drawn.tokens[rows, drawn.lengths[rows] - 1].astype(np.int64)
        going = drawn.going(rows, tokens, drawn.lengths[rows])
        if strings := drawn.sampling.stop:
            texts = [
                join_response(self._prompts[i], drawn.joined[i], drawn.tokens[i, : drawn.lengths[i]])
                for i in rows[going]
            ]
            going[going] = ~load_stops(self.model.path, strings)(texts)
        over: NDArray[np.int64] = rows[~going]
        rows = rows[going]
        of = of[going]
        tokens = tokens[going]
        order = np.lexsort((tokens, of))
        parts = np.flatnonzero(np.diff(of[order]) | np.diff(tokens[order])) + 1
        left = set(numbers)
        for same in np.split(order, parts) if len(order) else ():
            one = of[same[0]]
            if tokens[same[0]] == outputs[one].new_token_ids[-1]:
                drawn.alike[numbers[one]] = rows[same]
                left.remove(numbers[one])
            else:
                self._add(rows[same])
        ended = {str(number) for number in left}
        self._running -= ended
        self.core.abort_requests([o.request_id for o in outputs if o.finish_reason is None and o.request_id in ended])
        for number in left:
            del drawn.alike[number]
        return over
