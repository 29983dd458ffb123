"""vLLM's scheduler and model on a rank: process groups, drawn tokens, and shards.

A replica is one copy of the model, sharded over ranks.

Invariant: vLLM sees the ranks of one replica as its whole world, without data parallelism. Each rank runs vLLM's
scheduler. All schedulers make the same decisions, because all ranks get the same requests in the same order and draw
the same tokens.
"""

from __future__ import annotations

import gc
import itertools
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from ...ir.workload import Workload
from ...model.architecture import Model
from ...model.models import read_engine_fields
from ...sharding.layout import elements
from ...sharding.tensors import Box
from ..engine_protocols import GenerateRequest, Shard
from ..generation.sampling import draw
from ..hf_modules import DTYPES
from . import transformers_models
from .spec import DRAWN, block_size, count_cache_bytes, count_sequences_and_blocks, count_step_tokens

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from vllm.v1.sample.logits_processor import BatchUpdate

    from ..devices import Devices

LATENT_EPSILON = 1e-6
# Fields of config.json that transformers does not write, by the kind of router.
ROUTERS = {"grouped_sigmoid": {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}}
# For vLLM's process: the scheduler runs inside it, and nothing is sent.
SURROUNDINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the V2 runner has no logits processors yet
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # generation/sampling.py samples; FlashInfer would compile unused kernels
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
# In addition on host cores: threads stay where the rank put them, and nothing is compiled. (Elsewhere
# TORCHDYNAMO_DISABLE would make torch.accelerator wait for nothing.)
ON_HOST = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
# Decoding steps are captured as graphs, which needs no compilation. Cache and weights keep their addresses in sleep.
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
# All ranks must count torch's group numbers alike. Only some ranks create vLLM's groups, so these have numbers of their
# own, from here on.
_group_counts = itertools.count(1 << 20, 1 << 20)


class SampledBatch:
    """The tokens that one call of `generate` has drawn. A row is one response.

    - `tokens` and `logps` [rows, tokens]: valid up to each row's length in `lengths`.
    - `rows_by_request`: for each request number, the rows that share the request, because they have the same tokens up
      to the current step.
    """

    def __init__(self, request: GenerateRequest) -> None:
        import numpy as np

        keys = self.keys = request.keys
        self.sampling = request.sampling
        self.begun = np.broadcast_to(request.begun, len(keys))
        self.joined = np.broadcast_to(request.sampling.joined, len(keys))
        self.room = request.room
        longest = int(self.room.max(initial=0))
        self.tokens = np.zeros((len(keys), longest), np.int32)
        self.logps = np.zeros((len(keys), longest), np.float32)
        self.lengths = np.zeros(len(keys), np.int64)
        self.rows_by_request: dict[int, NDArray[np.int64]] = {}

    def expand_requests(self, numbers: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the rows of the requests `numbers`, in the order of the requests.

        Also return, for each of these rows, the index of its request in `numbers`.
        """
        import numpy as np

        rows = [self.rows_by_request[number] for number in numbers]
        return np.concatenate(rows), np.repeat(np.arange(len(rows)), [len(request_rows) for request_rows in rows])

    def find_continuing(self, rows: NDArray[np.int64], tokens: NDArray[np.int64], lengths: NDArray[np.int64]) -> Any:
        """Return, for each of `rows`, whether it continues after its last token.

        `tokens` has the last token of each row. A row ends after an end token, or at its largest number of tokens.
        `lengths` are the rows' lengths, including the last tokens.
        """
        import numpy as np

        return ~np.isin(tokens, self.sampling.ends) & (lengths < self.room[rows])


class TokenSampler:
    """A sampler that draws tokens in place of vLLM's sampler.

    The sampler sets all logits of a request to -inf, except the logit of one drawn token. vLLM then samples that token
    greedily. `group`: the ranks that must agree on the tokens.
    """

    call: SampledBatch

    def __init__(self) -> None:
        self.group: Any = None

    def draw(self, logits: torch.Tensor, numbers: Sequence[int]) -> torch.Tensor:
        """Draw a token for each row of the requests `numbers`; return the new logits.

        A row is one response. `logits` is [requests, vocabulary]. If some rows of a request do not end with their drawn
        token, the request continues with the token of one of these rows. vLLM also calls this method when it has
        computed only a part of a prompt. So a drawn token counts only after the engine has increased the row's entry in
        `SampledBatch.lengths`.
        """
        import numpy as np
        import torch

        call = self.call
        chunk = max(1, DRAWN // logits.shape[-1])
        rows, request_index = call.expand_requests(numbers)
        steps = call.lengths[rows]
        tokens = np.zeros(len(rows), np.int64)
        for i in range(0, len(rows), chunk):
            part = slice(i, i + chunk)
            own = rows[part]
            indices = request_index[part]
            dense = len(np.unique(indices)) == len(indices)
            used = (
                logits[indices[0] : indices[-1] + 1] if dense else logits[torch.from_numpy(indices).to(logits.device)]
            )
            token, logp = draw(
                used.float(), call.keys[own], call.begun[own] + steps[part], call.sampling.select(own), self.group
            )
            tokens[part] = token.cpu().numpy()
            call.logps[own, steps[part]] = logp.cpu().numpy()
        call.tokens[rows, steps] = tokens
        first = np.lexsort((~call.find_continuing(rows, tokens, steps + 1), request_index))
        chosen = torch.from_numpy(tokens[first[np.searchsorted(request_index, np.arange(len(numbers)))]])
        return logits.fill_(-float("inf")).scatter_(-1, chosen.to(logits.device)[:, None], 0.0)


def _make_processor(sampler: TokenSampler) -> type:
    """Make a vLLM logits processor that draws tokens with `sampler`."""
    from vllm.v1.sample.logits_processor import LogitsProcessor, MoveDirectionality

    class Processor(LogitsProcessor):  # type: ignore[misc]
        def __init__(self, *_: Any) -> None:
            self.batch: dict[int, int] = {}  # request by row of the logits

        def is_argmax_invariant(self) -> bool:
            return False

        def update_state(self, batch_update: BatchUpdate | None) -> None:
            if batch_update is None:
                return
            for row in batch_update.removed:
                self.batch.pop(row, None)
            for row, params, *_ in batch_update.added:
                self.batch[row] = params.extra_args["number"]
            for row, target, how in batch_update.moved:
                moved = self.batch.pop(row)
                swapped = self.batch.pop(target, None)
                self.batch[target] = moved
                if how == MoveDirectionality.SWAP and swapped is not None:
                    self.batch[row] = swapped

        def apply(self, logits: torch.Tensor) -> torch.Tensor:
            return sampler.draw(logits, [self.batch[i] for i in range(len(logits))])

    return Processor


class Replica:
    """The process groups of one vLLM engine.

    vLLM has one set of process groups per process, in global variables. During a call of this engine, the variables
    hold this engine's set. So a call never uses process groups that no longer exist. It also never uses the groups of
    another engine, some of which (such as expert groups) can be missing.
    """

    def __init__(self, devices: Devices) -> None:
        from torch import distributed as dist

        wanted = SURROUNDINGS | (ON_HOST if devices.device.kind.is_host else {})
        os.environ |= {name: value for name, value in wanted.items() if name not in os.environ}
        # In the order of vLLM's ranks (tp fastest, then pp).
        ranks = [dist.get_rank()]
        if devices.mesh is not None:
            axes = tuple(axis for axis in ("pp", "tp") if axis in (devices.mesh.mesh_dim_names or ()))
            ranks = devices.mesh[axes].mesh.flatten().tolist()
        self.group = dist.new_group(ranks, use_local_synchronization=True)
        self._held: dict[str, Any] = {}

    @contextmanager
    def activate(self) -> Iterator[None]:
        from vllm.distributed import parallel_state as state

        names = [name for name in state.__annotations__ if name.isupper()]  # all are None before groups exist
        before = {name: getattr(state, name) for name in names}
        vars(state).update(dict.fromkeys(names) | self._held)
        try:
            yield
        finally:
            self._held = {name: getattr(state, name) for name in names}
            vars(state).update(before)

    @contextmanager
    def as_world(self) -> Iterator[None]:
        """Within the context, make the replica's ranks torch's whole world.

        vLLM creates its process groups in this context.
        """
        from torch.distributed import distributed_c10d as c10d

        world = c10d._get_default_group()
        count = c10d._world.group_count
        c10d._update_default_pg(self.group)
        c10d._world.group_count = next(_group_counts)
        try:
            with self.activate():
                yield
        finally:
            c10d._update_default_pg(world)
            c10d._world.group_count = count


def build_core(model: Model, work: Workload, devices: Devices, group: Any, sampler: TokenSampler) -> Any:
    """Build vLLM's scheduler and model on this rank."""
    if "latent_attention" in model.features:
        _check_rotary(model)
    if work.on_host:
        os.environ["VLLM_MLA_DISABLE"] = "1"
        import vllm._custom_ops as operators

        operators._supports_onednn = False  # otherwise it packs parameters for oneDNN, and later writes are lost
    import torch
    from torch import distributed as dist
    from vllm import envs
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    transformers_models.keep_classes_unchanged()
    # Name of the memory that the replica's ranks share on a host. It starts with the name of the temporary folder. By
    # that prefix the memory is removed if a rank is killed before all ranks have opened it.
    name = f"{Path(tempfile.gettempdir()).name}-{uuid4().hex}".encode().ljust(255)
    name_bytes = torch.tensor(list(name), dtype=torch.uint8)  # a file name has at most 255 bytes
    dist.broadcast(name_bytes, group=group, group_src=0)
    memory = bytes(name_bytes.tolist()).decode().strip()

    class Executor(ExecutorWithExternalLauncher):  # type: ignore[misc]
        def _distributed_args(self) -> tuple[str, int, int]:
            return memory, dist.get_rank(), devices.device.index

    # vLLM's own rule would place layers that do not divide evenly on other stages than the plan does.
    envs.VLLM_PP_LAYER_PARTITION = ",".join(map(str, work.layout.chunks(model.layers)))
    overrides = ROUTERS.get(model.expert_mlp.router, {}) if model.expert_mlp else {}
    overrides = {**overrides, "quantization_config": None}  # the weights that a run delivers are never quantized
    sequences, blocks = count_sequences_and_blocks(work)
    arguments = EngineArgs(
        model=model.path,
        skip_tokenizer_init=True,
        generation_config="vllm",
        load_format="dummy",
        dtype=DTYPES[work.dtype],
        max_model_len=work.prompt + work.response,
        max_num_seqs=sequences,
        max_num_batched_tokens=count_step_tokens(work),
        block_size=block_size(work),
        num_gpu_blocks_override=blocks,
        kv_cache_memory_bytes=count_cache_bytes(work),
        # Share of a device that must be free at the start; the plan has counted all users of the device.
        gpu_memory_utilization=0.01,
        async_scheduling=False,  # draw before the next step starts; vLLM's default only on the CPU
        enforce_eager=work.on_host or work.records_routes,  # a graph calls no router
        enable_sleep_mode=not work.on_host,
        compilation_config={} if work.on_host else GRAPHS,
        tensor_parallel_size=work.layout.tp,
        pipeline_parallel_size=work.layout.pp,
        distributed_executor_backend="external_launcher",
        logits_processors=[_make_processor(sampler)],
        seed=0,
        hf_overrides=overrides,
        enable_expert_parallel=work.layout.ep > 1,
        disable_log_stats=True,
    )
    engine_core = EngineCore(arguments.create_engine_config(), Executor, log_stats=False)
    gc.unfreeze()  # vLLM froze all objects of this process, as if they lived as long as it does
    # By now all ranks of the replica have opened the memory. Without a name, the system frees it when the last of these
    # processes ends, however that happens.
    for leftover in Path("/dev/shm").glob(f"{memory}*"):
        leftover.unlink(missing_ok=True)
    return engine_core


def _check_rotary(model: Model) -> None:
    """Raise ValueError unless vLLM supports the rotary positions of latent attention."""
    stated = read_engine_fields(model)
    rope_type = stated["rope_parameters"]["rope_type"]
    if not stated.get("rope_interleave", True) or rope_type not in ("default", "yarn"):
        raise ValueError(
            f"vLLM supports latent attention with rotary positions in pairs (`rope_interleave`), default or YaRN, but "
            f"`{model.name}` has another kind: use `hf`"
        )


def apply_model_settings(module: Any, on_host: bool) -> None:
    """Make vLLM compute latent attention as transformers does.

    - Norms of latents get the fixed epsilon of transformers, whatever the config's epsilon is.
    - On host cores, torch applies the rotary positions of latent attention. vLLM's kernel cannot: it supports only
      default rotary positions and the shape [tokens, heads x size], but the tensors are [tokens, heads, size].
    """
    for name, part in module.named_modules():
        if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
            part.variance_epsilon = LATENT_EPSILON
        if on_host and hasattr(part, "kv_b_proj"):
            part.rotary_emb._forward_method = part.rotary_emb.forward_native


def repack_weights(module: Any, dtype: Any, turned: bool) -> None:
    """Convert new weights in place to the formats that vLLM's kernels read.

    Two kinds of weights are converted: experts, and the tensors that latent attention derives from its projections. If
    `turned` is true, experts are stored transposed. Such experts are not converted here, because `make_shards` handles
    them.
    """
    import torch

    for layer in module.modules():
        if hasattr(layer, "w13_weight") and not turned:
            method = layer.quant_method
            # The kernel object, in vLLM 0.23 on a CPU and elsewhere.
            kernel = getattr(method, "cpu_fused_moe", None) or getattr(method.moe_kernel, "fused_experts", None)
            if (isa := getattr(kernel, "isa", None)) is None:
                method.process_weights_after_loading(layer)
                continue
            import vllm._custom_ops as operators

            # The CPU kernels read packed weights; vLLM packs them once, and not again after an update.
            with torch.no_grad():
                for weight in (layer.w13_weight, layer.w2_weight):
                    weight.copy_(operators.cpu_prepack_moe_weight(weight.clone(), isa))
        elif hasattr(layer, "kv_b_proj") and hasattr(layer, "process_weights_after_loading"):
            with torch.no_grad():
                layer.process_weights_after_loading(dtype)


def make_shards(
    boxes: dict[str, Box], named: dict[str, torch.Tensor], fused: dict[str, Iterable[str]], turned: bool = False
) -> Iterator[Shard]:
    """Yield a shard for each box of `boxes`, as a view of vLLM's parameters `named`.

    - `fused`: for each parameter in which vLLM concatenates weights, the names of these weights.
    - `turned`: whether experts are stored transposed as [experts, in, out], as in vllm-ascend.
    """
    import torch

    fused_parts = {part: (fused_name, list(parts)) for fused_name, parts in fused.items() for part in parts}
    sizes = {name: [stop - start for start, stop in box] for name, box in boxes.items()}
    seen: set[str] = set()

    def parameter(name: str, source: str) -> torch.Tensor:
        if source not in named:
            raise ValueError(f"vLLM does not support the weight {name}: it has no {source}")
        seen.add(source)
        return named[source]

    def dense(name: str) -> torch.Tensor:
        owner, _, kind = name.rpartition(".")
        owner, _, leaf = owner.rpartition(".")
        begin = 0
        source = name
        if leaf in fused_parts and name not in named:
            fused_name, parts = fused_parts[leaf]
            source = f"{owner}.{fused_name}.{kind}"
            begin = sum(sizes[f"{owner}.{part}.{kind}"][0] for part in parts[: parts.index(leaf)])
        return parameter(name, source)[begin : begin + sizes[name][0]]

    def experts(name: str) -> torch.Tensor:
        """Return the expert weight `name`, as a view of vLLM's parameter.

        vLLM concatenates gate and up in one parameter. Gate, up and down may each have padding, which the view
        excludes.
        """
        owner, _, leaf = name.partition(".*.")
        kind = "w2_weight" if leaf.startswith("down") else "w13_weight"
        places = (f"{owner}.routed_experts.{kind}", f"{owner}.{kind}")
        stacked = parameter(name, next((place for place in places if place in named), places[0]))
        stacked = stacked.transpose(1, 2) if turned else stacked
        if kind == "w2_weight":
            return stacked.narrow(2, 0, sizes[name][2])
        return stacked.narrow(1, stacked.shape[1] // 2 if leaf.startswith("up") else 0, sizes[name][1])

    for name, size in sizes.items():
        if not elements(boxes[name]):  # a weight of another stage, or only padding of a short vocabulary
            seen.add(name)
            yield Shard(name, boxes[name], torch.empty(size))
            continue
        view = (experts if "*" in name else dense)(name)
        if list(view.shape) != size:
            raise ValueError(f"vLLM has the weight {name} in another shape: {list(view.shape)}, not {size}")
        yield Shard(name, boxes[name], view)
    if unmatched := sorted(named.keys() - seen):
        raise ValueError(f"vLLM has a weight that the model lacks: {unmatched[0]}")
