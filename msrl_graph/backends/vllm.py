"""Generation by vLLM in the rank's own process (vllm-ascend on Ascend).

Invariant: the shards are views into vLLM's own parameters, so that resharding fills them box by box; parameters and
cache have memory only between `allocate` and `release`. Tokens are drawn by draw.py, not by vLLM: what is drawn for a
row is what the light engine draws, but for the rounding of logits.

On cuda and npu it has never run: no such device was at hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..ir.work import Work, kv_elements
from ..sharding.layout import shard
from . import spread
from .devices import release, take, trim
from .spec import BYTES, EngineSpec, Lint, Moments, Sampling, Shard, Situation, Weights
from .stops import looks_for
from .vllm_core import BLOCK, DRAWN, STEP, Drawing, cached, core, fed, replica, settle, views

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..ir.plan import Placement
    from .devices import Devices


def _lints(situation: Situation) -> Iterator[Lint]:
    others = sorted(situation.beside - {"vllm"})
    if others and not situation.device.groups_beside_sleep:
        # github.com/modelscope/ms-swift/issues/6636
        message = (
            f"vllm sleeps on devices that `{others[0]}` works on: on Ascend, groups of HCCL cannot be made meanwhile"
        )
        help = (
            "make all groups before it first sleeps, and set PYTORCH_NPU_ALLOC_CONF=expandable_segments:False; or "
            "put them `apart`"
        )
        yield Lint(message, help)


def _peaks(verb: str, work: Work) -> Moments:
    """The cache has whole blocks. vLLM has logits in float32 too; some at a time are drawn from in float64: their
    exponentials, the sums of these, and what is sorted."""
    model, layout = work.model, work.layout
    sequences, blocks = cached(work)
    tokens = min(max(STEP, sequences), max(fed(work), sequences))
    heads = -(-model.heads // layout.tp) * model.head_dim
    # The residual, before and after, the states in and out; of the other half both products, as one, what becomes of
    # the first, and their product.
    inside = 4 * model.hidden + max(heads + 2 * model.kv_elements, 4 * -(-model.intermediate // layout.tp))
    logits, item = sequences * model.vocabulary, BYTES[work.dtype]
    drawn = min(logits, max(DRAWN, model.vocabulary))
    cache = {"KV cache": blocks * BLOCK * kv_elements(model, layout) * item}
    return {
        "a step": {**cache, "activations": tokens * inside * item},
        "a token is drawn": {**cache, "logits": logits * (item + 4 * (item < 4)) + drawn * 3 * 8},
    }


SPEC = EngineSpec(
    name="vllm",
    verbs=("generate",),
    axes=("tp", "pp", "dp", "ep", "etp"),
    build="msrl_graph.backends.vllm:Engine",
    options=("micro_batch", "dtype", "memory"),
    vocabulary_multiple=64,
    pads_whole=True,
    replicates_kv_heads=True,
    spread=spread.VLLM,
    families=("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3"),
    # Of ep: the kernel for the CPU does not know whose experts are whose, and ends the process.
    planned=("ep", "deepseek_v3"),
    needs=("vllm",),
    lints=_lints,
    continuous=True,
    shares_beginnings=True,
    peaks=_peaks,
    chosen=("device",),
    one_mesh=True,  # its process groups are of the process
)


class Engine:
    """A generator on this rank."""

    def __init__(self, weights: Weights, placement: Placement, devices: Devices) -> None:
        assert weights.work is not None
        self.model, self.drawing = weights.model, Drawing()
        with replica(devices) as group:
            self.drawing.group = group if placement.layout.tp * placement.layout.pp > 1 else None
            self.core = core(weights.model, weights.work, devices, group, self.drawing)
        runner = self.core.model_executor.driver_worker.worker.model_runner
        if runner.intermediate_tensors is None and placement.layout.pp > 1:
            # A stage's input, which vLLM makes room for when it warms up; on the CPU it does not.
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                runner.max_num_tokens, runner.model_config.dtype, runner.device
            )
        # Of prompts that come as embeddings, which none does: as large as a step's hidden states.
        for unread in {id(t): t for t in (runner.inputs_embeds.cpu, runner.inputs_embeds.gpu)}.values():
            release(unread)
        side = SPEC.side(placement.layout)
        boxes = {t.name: shard(t, side, devices.rank) for t in weights.model.tensors}
        named = dict(runner.model.named_parameters())
        for parameter in named.values():
            parameter.requires_grad_(False)
        self._shards = list(views(boxes, named, getattr(runner.model, "packed_modules_mapping", {})))
        self._parameters = list(dict.fromkeys(named.values()))
        passed = runner.intermediate_tensors.tensors.values() if runner.intermediate_tensors is not None else ()
        self._caches = list({c.data_ptr(): c for c in (*runner.kv_caches, *passed)}.values())
        self._sizes = {id(t): t.untyped_storage().nbytes() for t in (*self._parameters, *self._caches)}
        # What pads the vocabulary, or a rank's part of experts: nothing fills it.
        padded = [t.name for t in weights.model.tensors if t.padded and t.name in named]
        self._padding = [named[name][boxes[name][0][1] - boxes[name][0][0] :] for name in padded]
        self._padding += [parameter for parameter in self._parameters if parameter.ndim == 3]
        self.module = runner.model
        self._open = True  # whether the caches have memory
        self.longest = weights.work.prompt + weights.work.response  # tokens of a sequence
        self.release()

    def allocate(self) -> list[Shard]:
        for parameter in self._parameters:
            take(parameter, self._sizes[id(parameter)])
        for rows in self._padding:
            rows.zero_()
        return self._shards

    def filled(self) -> None:
        settle(self.module)
        assert self.core.reset_prefix_cache(), "a generation is under way"

    def release(self) -> None:
        assert self.core.reset_prefix_cache(), "a generation is under way"
        for tensor in (*self._parameters, *self._caches):
            release(tensor)
        self._open = False
        trim()

    def generate(
        self,
        prompts: list[NDArray[np.int32]],
        rows: NDArray[np.int64],
        sampling: Sampling,
        begun: NDArray[np.int64] | None = None,
    ) -> tuple[list[NDArray[np.int32]], list[NDArray[np.float32]]]:
        import numpy as np
        import torch

        if not self._open:
            for cache in self._caches:
                take(cache, self._sizes[id(cache)])
                cache.zero_()  # what kernels read beyond a sequence's end must be numbers
            self._open = True
        begun = np.zeros(len(rows), np.int64) if begun is None else begun
        each, room = len(rows) // len(prompts), sampling.max_tokens - begun
        drawn = self.drawing.begin(rows, begun, sampling)
        running = dict.fromkeys(map(str, range(len(rows))))
        with torch.inference_mode():
            try:
                for i in range(len(rows)):
                    self._add(i, prompts[i // each], int(room[i]), sampling.ends)
                while running:
                    self._step(running, sampling.stop)
            finally:
                self.core.abort_requests(list(running))  # none, unless a step raised
        ends = drawn.lengths.tolist()
        return [drawn.tokens[i, :n].copy() for i, n in enumerate(ends)], [
            drawn.logps[i, :n].copy() for i, n in enumerate(ends)
        ]

    def _add(self, place: int, prompt: NDArray[np.int32], room: int, ends: tuple[int, ...]) -> None:
        from vllm import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        if len(prompt) + room > self.longest:
            what = f"a prompt of {len(prompt)} tokens and {room} more"
            raise ValueError(f"{what} are over the {self.longest} that it was built for")
        params = SamplingParams(
            temperature=0.0,
            max_tokens=room,
            stop_token_ids=list(ends),
            ignore_eos=True,
            detokenize=False,
            extra_args={"place": place},
        )
        request = EngineCoreRequest(
            request_id=str(place),
            prompt_token_ids=prompt.tolist(),
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        self.core.add_request(*self.core.preprocess_add_request(request))

    def _step(self, running: dict[str, None], strings: tuple[str, ...]) -> None:
        """Computes one more token of the requests that the scheduler chooses, and takes those that end out of
        `running`."""
        import numpy as np

        drawn, going = self.drawing.call, []
        found, ran = self.core.step_fn()
        self.core.post_step(ran)
        for output in found[0].outputs if found and 0 in found else ():
            place = int(output.request_id)
            drawn.lengths[place] += len(output.new_token_ids)
            if output.finish_reason is not None:
                del running[output.request_id]
            elif output.new_token_ids:
                going.append(place)
        if not strings:
            return
        places = np.array(going, np.int64)
        stops = looks_for(self.model.path, strings)
        for length in np.unique(drawn.lengths[places]):
            some = places[drawn.lengths[places] == length]
            ended = [str(i) for i in some[stops(drawn.tokens[some, :length])]]
            self.core.abort_requests(ended)
            for name in ended:
                del running[name]
