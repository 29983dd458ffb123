"""vLLM's scheduler and model as an engine's half: the ranks that it sees, the tokens that are drawn in its place, and
where weights lie in it.

Invariant: vLLM is shown the ranks of one replica as the whole world; dp stays outside. Each of them runs vLLM's
scheduler, alike, since all are handed the same requests in the same order and draw the same tokens.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from ...ir.workload import Workload, kv_elements
from ...model.architecture import Model
from ...model.config import ROUTER, fields
from ...sharding.layout import Box, elements
from ..generation.sampling import draw
from ..hf_modules import DTYPES
from ..spec import BYTES, Sampling, Shard

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from vllm.v1.sample.logits_processor import BatchUpdate

    from ..devices import Devices

# Tokens of a block of the cache: of these alone do prompts share the beginning. vLLM's kernels for the CPU take
# multiples of 32, vllm-ascend's 128 alone (attention_v1.py, get_supported_kernel_block_sizes).
BLOCK = 32
DEVICE_BLOCK = 128
DRAWN = 1 << 24  # logits that are drawn from at once, in float64
LATENT_EPSILON = 1e-6
STEP = 8192  # tokens that a step computes at most, unless more sequences run
# Of vLLM's process: the scheduler runs in it, nothing is sent.
SURROUNDINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # which has no processors of logits yet
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # generation/sampling.py samples; FlashInfer would compile unused kernels
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
# Of a process on a host's cores besides: threads are where the rank has put them, nothing is compiled. (Elsewhere the
# latter would have torch.accelerator wait for nothing.)
ON_HOST = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
# Steps of decoding are captured as graphs, for which nothing need be compiled; a cache and weights that sleep are at
# their addresses when they wake.
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
# Names of process groups are numbers that all ranks count alike; those of vLLM are made by some, and count apart.
_apart = itertools.count(1 << 20, 1 << 20)


def block(work: Workload) -> int:
    return BLOCK if work.on_host else DEVICE_BLOCK


def fed(work: Workload) -> int:
    """Tokens of the prompts of all sequences at once: those that run share whole blocks of a prompt, but for the one
    that its last token is in."""
    shared = max(0, work.prompt - 1) // block(work) * block(work)
    return work.rows * shared + work.rows * work.samples * (work.prompt - shared)


def stepped(work: Workload) -> int:
    """Tokens that a step computes at most."""
    sequences = work.rows * work.samples
    return min(max(STEP, sequences), max(fed(work), sequences))


def cached(work: Workload) -> tuple[int, int]:
    """Sequences at once, and blocks for all of them at their bound; the first block is vLLM's own."""
    sequences = work.rows * work.samples
    return sequences, 1 + sequences * -(-(work.prompt + work.response) // block(work))


def cache_elements(work: Workload) -> int:
    """Elements of keys and values that a token leaves on a rank. On a host latents are expanded before they are kept:
    vLLM's kernel for them there takes published models' sizes alone, and shares no beginnings of prompts."""
    model = replace(work.model, latent=None) if work.on_host else work.model
    return kv_elements(model, work.layout)


class SampledBatch:
    """What a call of `generate` has drawn: [rows, tokens] each, the first `lengths` of which hold; a row gets at most
    `room`. `alike`: by the number of a request, the rows that it computes, whose tokens are the same so far."""

    def __init__(
        self, keys: NDArray[np.uint64], begun: NDArray[np.int64], room: NDArray[np.int64], sampling: Sampling
    ) -> None:
        import numpy as np

        self.keys = keys
        self.begun = begun
        self.room = room
        self.sampling = sampling
        self.joined = np.broadcast_to(sampling.joined, len(keys))
        most = int(room.max(initial=0))
        self.tokens = np.zeros((len(keys), most), np.int32)
        self.logps = np.zeros((len(keys), most), np.float32)
        self.lengths = np.zeros(len(keys), np.int64)
        self.alike: dict[int, NDArray[np.int64]] = {}

    def each(self, numbers: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The rows of some requests, one request after another, and of each row its request's place among them."""
        import numpy as np

        rows = [self.alike[number] for number in numbers]
        return np.concatenate(rows), np.repeat(np.arange(len(rows)), [len(some) for some in rows])

    def going(self, rows: NDArray[np.int64], tokens: NDArray[np.int64], lengths: NDArray[np.int64]) -> Any:
        """Whether rows go on, of which these are the last tokens, with which they have these lengths."""
        import numpy as np

        return ~np.isin(tokens, self.sampling.ends) & (lengths < self.room[rows])


class TokenSampler:
    """Draws the tokens in vLLM's place: of a request's logits all but that of one drawn token become -inf, so that
    vLLM, which takes the best, takes it. `group`: the ranks that must agree."""

    call: SampledBatch

    def __init__(self) -> None:
        self.group: Any = None

    def draw(self, logits: torch.Tensor, numbers: Sequence[int]) -> torch.Tensor:
        """`numbers`: of each row of logits its request. Draws for all rows of a request; it goes on with one of those
        that go on, if any does. What is drawn counts when `lengths` do: of a prompt in parts vLLM asks for logits
        too."""
        import numpy as np
        import torch

        call = self.call
        most = max(1, DRAWN // logits.shape[-1])
        rows, of = call.each(numbers)
        steps = call.lengths[rows]
        tokens = np.zeros(len(rows), np.int64)
        for i in range(0, len(rows), most):
            part = slice(i, i + most)
            some = rows[part]
            here = of[part]
            alone = len(np.unique(here)) == len(here)
            found = logits[here[0] : here[-1] + 1] if alone else logits[torch.from_numpy(here).to(logits.device)]
            token, logp = draw(
                found.float(), call.keys[some], call.begun[some] + steps[part], call.sampling.of(some), self.group
            )
            tokens[part] = token.cpu().numpy()
            call.logps[some, steps[part]] = logp.cpu().numpy()
        call.tokens[rows, steps] = tokens
        first = np.lexsort((~call.going(rows, tokens, steps + 1), of))
        taken = torch.from_numpy(tokens[first[np.searchsorted(of, np.arange(len(numbers)))]])
        return logits.fill_(-float("inf")).scatter_(-1, taken.to(logits.device)[:, None], 0.0)


def _processor(drawing: TokenSampler) -> type:
    """The drawing as vLLM's processors of logits are made."""
    from vllm.v1.sample.logits_processor import LogitsProcessor, MoveDirectionality

    class Processor(LogitsProcessor):  # type: ignore[misc]
        def __init__(self, *_: Any) -> None:
            self.batch: dict[int, int] = {}  # requests, by row of the logits

        def is_argmax_invariant(self) -> bool:
            return False

        def update_state(self, batch_update: BatchUpdate | None) -> None:
            if batch_update is None:
                return
            for i in batch_update.removed:
                self.batch.pop(i, None)
            for i, params, *_ in batch_update.added:
                self.batch[i] = params.extra_args["number"]
            for i, j, how in batch_update.moved:
                here = self.batch.pop(i)
                there = self.batch.pop(j, None)
                self.batch[j] = here
                if how == MoveDirectionality.SWAP and there is not None:
                    self.batch[i] = there

        def apply(self, logits: torch.Tensor) -> torch.Tensor:
            return drawing.draw(logits, [self.batch[i] for i in range(len(logits))])

    return Processor


class Replica:
    """vLLM's process groups of one engine, of which it has one set a process; it is shown them while a call runs, and
    no other's, neither a world that has ended since nor one without groups of experts."""

    def __init__(self, devices: Devices) -> None:
        from torch import distributed as dist

        wanted = SURROUNDINGS | (ON_HOST if devices.device.kind.is_host else {})
        os.environ |= {name: value for name, value in wanted.items() if name not in os.environ}
        # In the order in which vLLM counts them (tp fastest, then pp).
        ranks = [dist.get_rank()]
        if devices.mesh is not None:
            axes = tuple(a for a in ("pp", "tp") if a in (devices.mesh.mesh_dim_names or ()))
            ranks = devices.mesh[axes].mesh.flatten().tolist()
        self.group = dist.new_group(ranks, use_local_synchronization=True)
        self._held: dict[str, Any] = {}

    @contextmanager
    def shown(self) -> Iterator[None]:
        from vllm.distributed import parallel_state as state

        names = [name for name in state.__annotations__ if name.isupper()]  # all are None before there are groups
        before = {name: getattr(state, name) for name in names}
        vars(state).update(dict.fromkeys(names) | self._held)
        try:
            yield
        finally:
            self._held = {name: getattr(state, name) for name in names}
            vars(state).update(before)

    @contextmanager
    def as_world(self) -> Iterator[None]:
        """Within, the replica is all that this process sees of the world: so its groups are made."""
        from torch.distributed import distributed_c10d as c10d

        world = c10d._get_default_group()
        count = c10d._world.group_count
        c10d._update_default_pg(self.group)
        c10d._world.group_count = next(_apart)
        try:
            with self.shown():
                yield
        finally:
            c10d._update_default_pg(world)
            c10d._world.group_count = count


def core(model: Model, work: Workload, devices: Devices, group: Any, drawing: TokenSampler) -> Any:
    """vLLM's scheduler and model on this rank."""
    if model.latent:
        _turns(model)
    if work.on_host:
        os.environ["VLLM_MLA_DISABLE"] = "1"
        import vllm._custom_ops as operators

        operators._supports_onednn = False  # else parameters are packed for its kernels, and what is written is lost
    import torch
    from torch import distributed as dist
    from vllm import envs
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    # Of the memory that the ranks of the replica share on a host: after the folder of temporary files, with which it is
    # cleared where a rank is killed before all have it open.
    name = f"{Path(tempfile.gettempdir()).name}-{uuid4().hex}".encode().ljust(255)
    shared = torch.tensor(list(name), dtype=torch.uint8)  # a name of a file has 255 bytes at most
    dist.broadcast(shared, group=group, group_src=0)
    memory = bytes(shared.tolist()).decode().strip()

    class Executor(ExecutorWithExternalLauncher):  # type: ignore[misc]
        def _distributed_args(self) -> tuple[str, int, int]:
            return memory, dist.get_rank(), devices.device.index

    # By its own rule vLLM gives layers that do not come out even to other stages than the plan.
    envs.VLLM_PP_LAYER_PARTITION = ",".join(map(str, work.layout.chunks(model.layers)))
    sequences, blocks = cached(work)
    arguments = EngineArgs(
        model=model.path,
        skip_tokenizer_init=True,
        generation_config="vllm",
        load_format="dummy",
        dtype=DTYPES[work.dtype],
        max_model_len=work.prompt + work.response,
        max_num_seqs=sequences,
        max_num_batched_tokens=stepped(work),
        block_size=block(work),
        num_gpu_blocks_override=blocks,
        kv_cache_memory_bytes=blocks * block(work) * cache_elements(work) * BYTES[work.dtype],
        # So much of a device must be free as it starts, which others may fill then: the plan has counted all of them.
        gpu_memory_utilization=0.01,
        async_scheduling=False,  # a step is drawn before the next begins; only for the CPU is that vLLM's default
        enforce_eager=work.on_host,
        enable_sleep_mode=not work.on_host,
        compilation_config={} if work.on_host else GRAPHS,
        tensor_parallel_size=work.layout.tp,
        pipeline_parallel_size=work.layout.pp,
        distributed_executor_backend="external_launcher",
        logits_processors=[_processor(drawing)],
        seed=0,
        hf_overrides=ROUTER if model.fixed else {},  # which transformers does not write
        enable_expert_parallel=work.layout.ep > 1,
        disable_log_stats=True,
    )
    made = EngineCore(arguments.create_engine_config(), Executor, log_stats=False)
    gc.unfreeze()  # it took all that this process holds for its own, to be there as long as it is
    # All of the replica have it open by now; without a name it goes with the last of them, however that ends.
    for left in Path("/dev/shm").glob(f"{name[0]}*"):
        left.unlink(missing_ok=True)
    return made


def _turns(model: Model) -> None:
    """Raises ValueError: vLLM turns the positions of latent attention otherwise than the model."""
    stated = fields(json.loads((Path(model.path) / "config.json").read_text(encoding="utf-8")))
    kind = stated["rope_parameters"]["rope_type"]
    if not stated.get("rope_interleave", True) or kind not in ("default", "yarn"):
        raise ValueError(
            f"vLLM turns positions of latent attention in pairs (`rope_interleave`), plain or stretched by YaRN, and "
            f"those of `{model.name}` are of another kind: use `hf`"
        )


def as_stated(module: Any, on_host: bool) -> None:
    """Gives the norms of latents the epsilon that transformers has for them: its own, whatever the config's is. On a
    host latents' positions are turned by torch: vLLM's kernel there takes plain ones in [tokens, heads x size] alone,
    and is given [tokens, heads, size]."""
    for name, part in module.named_modules():
        if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
            part.variance_epsilon = LATENT_EPSILON
        if on_host and hasattr(part, "kv_b_proj"):
            part.rotary_emb._forward_method = part.rotary_emb.forward_native


def settle(module: Any, dtype: Any, turned: bool) -> None:
    """Brings what was written into the forms that vLLM's kernels read besides, in their place: of experts, unless they
    are `turned`, which `views` knows of, and of what attention to latents makes of its projections."""
    import torch

    for layer in module.modules():
        if hasattr(layer, "w13_weight") and not turned:
            method = layer.quant_method
            # What computes them, in vLLM 0.23 on a CPU and elsewhere.
            kernel = getattr(method, "cpu_fused_moe", None) or getattr(method.moe_kernel, "fused_experts", None)
            if (isa := getattr(kernel, "isa", None)) is None:
                method.process_weights_after_loading(layer)
                continue
            import vllm._custom_ops as operators

            # The kernels for the CPU read them packed, which vLLM does once and not again after an update.
            with torch.no_grad():
                for weight in (layer.w13_weight, layer.w2_weight):
                    weight.copy_(operators.cpu_prepack_moe_weight(weight.clone(), isa))
        elif hasattr(layer, "kv_b_proj") and hasattr(layer, "process_weights_after_loading"):
            with torch.no_grad():
                layer.process_weights_after_loading(dtype)


def views(
    boxes: dict[str, Box], named: dict[str, torch.Tensor], fused: dict[str, Iterable[str]], turned: bool = False
) -> Iterator[Shard]:
    """Where each box lies in vLLM's parameters; `fused`: what it lays end to end in one, by its name; `turned`: whether
    it has experts by the product's rows, [experts, in, out], as vllm-ascend has."""
    import torch

    inside = {part: (whole, list(parts)) for whole, parts in fused.items() for part in parts}
    sizes = {name: [stop - start for start, stop in box] for name, box in boxes.items()}
    seen: set[str] = set()

    def parameter(name: str, found: str) -> torch.Tensor:
        if found not in named:
            raise ValueError(f"vLLM does not take the weight {name}: it has no {found}")
        seen.add(found)
        return named[found]

    def dense(name: str) -> torch.Tensor:
        owner, _, kind = name.rpartition(".")
        owner, _, leaf = owner.rpartition(".")
        begin = 0
        found = name
        if leaf in inside and name not in named:
            whole, parts = inside[leaf]
            found = f"{owner}.{whole}.{kind}"
            begin = sum(sizes[f"{owner}.{part}.{kind}"][0] for part in parts[: parts.index(leaf)])
        return parameter(name, found)[begin : begin + sizes[name][0]]

    def experts(name: str) -> torch.Tensor:
        """Gate and up lie end to end, each padded to what a kernel takes, as down is."""
        owner, _, leaf = name.partition(".*.")
        kind = "w2_weight" if leaf.startswith("down") else "w13_weight"
        places = (f"{owner}.routed_experts.{kind}", f"{owner}.{kind}")
        whole = parameter(name, next((p for p in places if p in named), places[0]))
        whole = whole.transpose(1, 2) if turned else whole
        if kind == "w2_weight":
            return whole.narrow(2, 0, sizes[name][2])
        return whole.narrow(1, whole.shape[1] // 2 if leaf.startswith("up") else 0, sizes[name][1])

    for name, size in sizes.items():
        if not elements(boxes[name]):  # another stage's, or of a short vocabulary all padding
            seen.add(name)
            yield Shard(name, boxes[name], torch.empty(size))
            continue
        view = (experts if "*" in name else dense)(name)
        if list(view.shape) != size:
            raise ValueError(f"vLLM has the weight {name} in another shape: {list(view.shape)}, not {size}")
        yield Shard(name, boxes[name], view)
    if left := sorted(named.keys() - seen):
        raise ValueError(f"vLLM has a weight that the model lacks: {left[0]}")
