"""The spec of generation by vLLM (engine.py)."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ...hardware.environment_variables import Setting
from ...ir.workload import Workload, kv_bytes
from ...model.features import SUPPORTED
from ...model.layers import DenseMlp, Mixer, Mlp, MultiHeadLatentAttention
from ...sharding.layout import Layout
from ..expert_placement import ExpertPlacement
from ..spec import (
    BYTES,
    Act,
    Capabilities,
    EngineSpec,
    Lint,
    MemoryModel,
    Moments,
    OperatorCalls,
    Situation,
    TimeModel,
    WeightSharding,
)
from .packages import PACKAGES

# Tokens of a cache block: prompts share only whole blocks. vLLM's CPU kernels support multiples of 32, vllm-ascend
# only 128 (attention_v1.py, get_supported_kernel_block_sizes).
BLOCK = 32
DEVICE_BLOCK = 128
DRAWN = 1 << 24  # logits that are drawn from at once, in float64
STEP = 8192  # most tokens that a step computes, unless more sequences run


def block_size(work: Workload) -> int:
    return BLOCK if work.on_host else DEVICE_BLOCK


def count_prompt_tokens(work: Workload) -> int:
    """Return the number of prompt tokens in the KV cache, over all sequences.

    The sequences of one prompt share the cache blocks that the prompt's tokens fill completely. The block of the
    prompt's last token is never shared.
    """
    shared = max(0, work.prompt - 1) // block_size(work) * block_size(work)
    return work.rows * shared + work.at_once * (work.prompt - shared)


def count_step_tokens(work: Workload) -> int:
    """Return the largest number of tokens that one step of vLLM computes.

    These are tokens of prompts. If the cache is smaller than all sequences need, they can also be those of a sequence
    that was preempted.
    """
    again = work.prompt + work.response if count_cache_bytes(work) < _count_whole_cache(work) else 0
    return min(max(STEP, work.at_once), max(count_prompt_tokens(work), work.at_once, again))


def count_sequences_and_blocks(work: Workload) -> tuple[int, int]:
    """Return the most sequences that run at once, and the number of KV-cache blocks.

    The number of blocks includes one block for vLLM itself.
    """
    if not work.cache_bytes:
        return work.at_once, 1 + work.at_once * -(-(work.prompt + work.response) // block_size(work))
    return work.at_once, int((work.cache_bytes + 0.5) // count_paged_bytes(work, 0, 0))


def count_cache_bytes(work: Workload) -> int:
    """Return the bytes of the KV cache on a rank."""
    return work.cache_bytes or _count_whole_cache(work)


def _count_whole_cache(work: Workload) -> int:
    """Return the bytes of a cache that holds all sequences at their bounds."""
    return round(count_paged_bytes(work, work.at_once, work.prompt + work.response))


def count_paged_bytes(work: Workload, sequences: float, tokens: float) -> float:
    """Return the bytes of a cache for so many sequences of so many tokens.

    The cache has whole blocks for each sequence, and one block for vLLM itself. A layer with a window has blocks for
    its window only. On host cores, the cache of latent attention has expanded keys and values instead of latents. The
    reason is that vLLM's CPU kernel for latents supports only the sizes of published models, and no shared prefixes.
    """
    block = block_size(work)
    item = BYTES[work.dtype]
    one, spare = (
        kv_bytes(work.model, work.layout, length, item, work.on_host)
        for length in (math.ceil(tokens / block) * block, block)
    )
    return sequences * one + spare


def _lints(situation: Situation) -> Iterator[Lint]:
    if not situation.device.is_host and "vllm" in situation.neighbour_engines:
        message = "two vllm generations share devices, but vLLM's sleep mode supports one engine per process"
        yield Lint(message, "place one of them `apart`, or on its own devices")


def _settings(situation: Situation) -> Iterator[Setting]:
    if not situation.device.plugin:
        return
    in_place = "weights are written in place, in the layout of the transfer"
    yield Setting("VLLM_ASCEND_ENABLE_NZ", "0", in_place, "vllm-ascend, worker/worker.py", fails="[^0].*")
    capture = "no graph is captured with level 2"
    yield Setting("TASK_QUEUE_ENABLE", "1", capture, "verl, perf_tuning_on_ascend.rst", fails="2")
    blocking = "graphs cannot be captured with blocking launches"
    yield Setting("ASCEND_LAUNCH_BLOCKING", "0", blocking, "vllm-ascend, platform.py", fails="1")
    # The allocator of a sleeping vLLM is a pool of its own, which does not contain expandable segments.
    freeing = "sleep mode must release memory"
    expandable = ".*expandable_segments *: *True.*"
    yield Setting(
        "PYTORCH_NPU_ALLOC_CONF", "expandable_segments:False", freeing, "Ascend/pytorch, issue 166", fails=expandable
    )


def _peaks(verb: str, work: Workload) -> Moments:
    """Return the bytes at each moment (instant) of a generation.

    The KV cache consists of whole blocks. vLLM keeps a float32 copy of the logits. Tokens are drawn in float64, for
    some rows at a time. A draw needs memory for exponentials, their sums, and sorted values.
    """
    model = work.model
    layout = work.layout
    sequences, _ = count_sequences_and_blocks(work)
    tokens = count_step_tokens(work)
    # The residual before and after, and the states in and out.
    halves = [_count_attention(mixer, layout) for mixer in model.mixers]
    halves += [_count_products(mlp, model.hidden, layout) for mlp in model.mlps]
    inside = 4 * model.hidden + max(halves)
    logits = sequences * model.vocabulary
    item = BYTES[work.dtype]
    drawn = min(logits, max(DRAWN, model.vocabulary))
    cache = _cache(work)
    return {
        "a step": {**cache, "activations": tokens * inside * item},
        "a token is drawn": {**cache, "logits": logits * (item + 4 * (item < 4)) + drawn * 3 * 8},
    }


def _count_attention(mixer: Mixer, layout: Layout) -> int:
    """Return how many elements attention computes for one token."""
    heads = -(-mixer.query_width // layout.tp)
    if isinstance(mixer, MultiHeadLatentAttention):
        return 4 * heads
    return heads + 4 * mixer.key_width


def _count_products(mlp: Mlp, hidden: int, layout: Layout) -> int:
    """Return how many elements an MLP computes for one token.

    These are gate and up as one product, the activation of gate, and the product with up. With experts, two workspaces
    are also counted (TritonExperts.workspace_shapes; the CPU kernel allocates its own).
    """
    if isinstance(mlp, DenseMlp):
        return 4 * -(-mlp.intermediate // layout.tp)
    inner = -(-mlp.intermediate // layout.etp)
    spaces = mlp.active * (max(inner, hidden) + max(2 * inner, hidden)) + mlp.number
    return spaces + 4 * -(-mlp.shared // layout.tp)


def _cache(work: Workload) -> dict[str, int]:
    return {"KV cache": count_cache_bytes(work)}


def _building(work: Workload) -> dict[str, int]:
    """Return the bytes that the engine holds when it is built, in addition to weights.

    The bytes are for the whole KV cache, and for vLLM's buffers for prompts that are passed as embeddings.
    """
    return _cache(work) | {"embedded prompts": count_step_tokens(work) * work.model.hidden * BYTES[work.dtype]}


# Cost in addition to operators, by processor time, in the number of operators that need the same time:
# - KERNELS: vLLM's own kernels in a layer (models of 2 and 6 layers).
# - SCHEDULED: the scheduler, for each sequence in a step.
# - BEGUN: the scheduler, for each sequence that begins, including its end. SCHEDULED and BEGUN are from 256 and 4
#   sequences, with 9 steps and with one step, on 2 layers.
# A step itself costs nothing more: its operators are small.
KERNELS = 16
SCHEDULED = 3.3
BEGUN = 13


def _calls(act: Act, layout: Layout) -> OperatorCalls:
    """Return how many operators Python calls in one call of the engine.

    `act` is the kind of the call. Each call includes the draw of a token. Torch's profiler counted the operators on
    Qwen2 models of 2 and 6 layers.
    """
    return OperatorCalls(46 + KERNELS, 156 + 17 * (layout.tp > 1), BEGUN if act == "prefill" else SCHEDULED)


def _places_experts(layout: Layout) -> bool:
    """Return whether vLLM supports a layout's ep and etp.

    Without ep, each expert is sharded over tp. With vLLM's option --enable-expert-parallel, whole experts are
    distributed over all ranks of one vLLM instance. An instance has tp x d ranks, where d is the size of vLLM's own
    data parallelism.
    """
    if layout.ep == 1:
        return layout.etp == layout.tp
    return layout.etp == 1 and layout.ep % layout.tp == 0 and layout.dp % (layout.ep // layout.tp) == 0


EXPERTS = ExpertPlacement(
    "without `ep` each tp rank holds a shard of every expert (etp is tp); with `ep = tp` it holds whole experts; an ep "
    "over several replicas (a multiple of tp) can be planned, not run",
    lambda layout: 1 if layout.ep > 1 else layout.tp,
    _places_experts,
    lambda layout: layout.ep * layout.etp == layout.tp,
    lambda layout: layout.ep * layout.etp > layout.tp,
)
# Features of models that can be planned, not run. vLLM's CPU kernel caps scores by other numbers than transformers.
LACKING = {"sliding_window", "mixed_layers", "attention_cap", "attention_sinks", "clamped_experts", "sigmoid_router"}
LACKING |= {"gated_delta_net", "output_gate", "gated_shared_experts"}
LACKING |= {"mamba2", "single_layers", "ungated_mlp", "linear_mlp"}
SPEC = EngineSpec(
    name="vllm",
    verbs=("generate",),
    build="msrl_graph.backends.vllm.engine:VllmEngine",
    capabilities=Capabilities(
        axes=("tp", "pp", "dp", "ep", "etp"),
        options=("micro_batch", "dtype", "memory"),
        features=SUPPORTED - LACKING,
        planned_features=SUPPORTED,
        opt_in=("min_p",),
        routes=True,
        off_host=("ep",),  # the CPU kernel does not know the owners of experts, and kills the process
        lints=_lints,
        settings=_settings,
        chosen=("device",),
    ),
    packages=PACKAGES,
    sharding=WeightSharding(
        vocabulary_multiple=64,
        pads_whole=True,
        replicates_kv_heads=True,
        spread=EXPERTS,
        packs_experts=True,
    ),
    memory=MemoryModel(
        own_groups=True,
        groups=lambda layout: (layout.tp > 1) + (layout.pp > 1) + (layout.ep > 1),
        peaks=_peaks,
        paged=count_paged_bytes,
        building=_building,
    ),
    time=TimeModel(
        continuous=True,
        shares_beginnings=("host", "device"),
        calls=_calls,
        fused=("device",),
        block=BLOCK,
    ),
)
