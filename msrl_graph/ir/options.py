"""Options of clusters and of the statements of a deploy, with their defaults.

Invariant: code reads the typed values of options, not their expressions (attributes.py). A plan stores a `DockOptions`,
a `ReshardOptions` and a `Run`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..diagnostics import NOWHERE, Span
from ..hardware.cluster import NETWORK, Figure
from ..hardware.device_presets import DEVICES
from ..sharding.layout import Layout
from .attribute_schema import DeclaredAttributes, attr
from .kinds import (
    BYTES,
    COUNT,
    COUNT_OR_0,
    DTYPE,
    FLOPS,
    RATE,
    SHARE,
    SIZE,
    TIME,
    CountsKind,
    ExtentKind,
    FlagKind,
    NumericKind,
    StringKind,
    TrackersKind,
    WordsKind,
)
from .workload import RECOMPUTED

OF_DEVICE = "of the device"


@dataclass(frozen=True)
class ClusterOptions(DeclaredAttributes):
    """Options of `cluster NAME { … }`.

    A figure that the program states replaces the figure in the preset that `device` names.
    """

    device: str = attr(
        StringKind(known=tuple(DEVICES.built_in)),
        "",
        'A preset of devices: see below. `"here"` is this machine, as measured by `msrl-doctor --calibrate`. `"cpu"` '
        "is a CPU with assumed figures.",
        must='"cpu"',
    )
    nodes: int = attr(COUNT, 1, "The number of hosts.")
    devices_per_node: int = attr(
        COUNT, 1, "The number of devices per host. On CPUs, a device is a process with one core."
    )
    network: Figure | float = attr(
        RATE,
        NETWORK,
        "The bandwidth that is reached between two hosts, each way. Rows use this bandwidth. Collectives also use it "
        "if there is no `fabric`.",
    )
    interface: str = attr(
        StringKind(),
        "",
        "The network interface that connects ranks on different hosts, such as `eth1`, by the same name on each host.",
        "the interface with the host's address in Ray",
    )
    memory: float | None = attr(BYTES, None, "The memory of a device.", OF_DEVICE)
    memory_bandwidth: float | None = attr(RATE, None, "The memory bandwidth of a device.", OF_DEVICE)
    host_link: float | None = attr(
        RATE, None, "The bandwidth between a device and the memory of its host, one way.", OF_DEVICE
    )
    device_link: float | None = attr(
        RATE, None, "The bandwidth between devices of a host, one way, per device.", OF_DEVICE
    )
    fabric: float | None = attr(
        RATE,
        None,
        "The bandwidth between hosts for collectives, per device. A device without a fabric uses `network`.",
        OF_DEVICE,
    )
    host_memory: float | None = attr(BYTES, None, "The memory of a host, shared by its devices.", OF_DEVICE)
    flops_bf16: float | None = attr(FLOPS, None, "The speed of a device in bfloat16.", OF_DEVICE)
    flops_f32: float | None = attr(FLOPS, None, "The speed of a device in float32.", OF_DEVICE)
    launch: float | None = attr(TIME, None, "The minimum time of a kernel (on a CPU: of an operator).", OF_DEVICE)


@dataclass(frozen=True)
class ModelOptions(DeclaredAttributes):
    """Options of `model NAME = "…" { … }`."""

    dtype: str | None = attr(DTYPE, None, "The type of the weights.", "the type in the model's config")
    base: str = attr(
        StringKind(),
        "",
        "For the folder of an adapter: the model that the adapter belongs to, a folder or the name of a preset.",
        "the model that the folder names",
    )


@dataclass(frozen=True)
class LayoutOptions(DeclaredAttributes):
    """Options of `layout NODES { … }`.

    If `dp` is 0, the placement chooses dp. If `etp` is 0, the engine chooses etp.
    """

    tp: int = attr(COUNT, Layout.tp, "Tensor parallelism: shards matrices and attention heads.")
    cp: int = attr(COUNT, Layout.cp, "Context parallelism: shards sequences.")
    pp: int = attr(NumericKind(1, 10_000, whole=True), Layout.pp, "Pipeline parallelism: divides layers into stages.")
    dp: int = attr(COUNT, 0, "Data parallelism: divides rows.", "the rest of the pool")
    ep: int = attr(
        COUNT, Layout.ep, "Expert parallelism: distributes whole experts over the ranks of a stage (tp · cp · dp)."
    )
    etp: int = attr(
        COUNT, 0, "Tensor parallelism of each expert, over the same ranks as `ep`.", "chosen by the engine: see below"
    )
    vpp: int = attr(
        NumericKind(1, 100, whole=True), Layout.vpp, "Interleaved stages: the number of chunks of layers on each stage."
    )
    stages: tuple[int, ...] = attr(
        CountsKind(), Layout.stages, "The number of layers of each of the pp · vpp chunks, in order.", "even"
    )
    zero: int = attr(
        NumericKind(0, 3, whole=True),
        Layout.zero,
        "ZeRO over dp: 0 shards nothing, 1 the optimizer states, 2 also gradients, 3 also weights (arXiv:1910.02054).",
    )
    cp_kind: str = attr(WordsKind(("ring", "ulysses")), Layout.cp_kind, "How attention computes on sharded sequences.")


@dataclass(frozen=True)
class EngineOptions(DeclaredAttributes):
    """Options of `engine NODES = NAME { … }`; an engine may support only some of them."""

    dtype: str | None = attr(DTYPE, None, "The type in which the engine computes.", "of the model")
    memory: float = attr(SHARE, 0.9, "The share of a device's memory that a generation may use, weights included.")
    micro_batch: int | None = attr(
        COUNT,
        None,
        "The number of rows that a rank computes at one time. For a generation: the most prompts, whose responses are "
        "generated at one time; fewer are, if the KV cache is smaller. It does not change results. A loss term "
        "computes the value of a row from that row alone; a run tests this before it begins. A term of the whole "
        "mini-batch needs an additional pass.",
        "limited by `micro_batch_tokens` or by memory",
    )
    micro_batch_tokens: int | None = attr(
        COUNT,
        None,
        "For an infer or an update, instead of `micro_batch`: the number of tokens that a rank computes at one time, "
        "prompts included. As many rows as fit are computed together; a longer row is computed alone. Rows with the "
        "same prompt stay together if they fit. It does not change results.",
        "limited by memory, at most 16,384 or the longest row",
    )
    offload: str = attr(
        WordsKind(("none", "optimizer", "weights", "all", "phase")),
        "none",
        "What is in host memory when it is not in use. `optimizer`: the optimizer states of an update, which a step "
        "copies in and out part by part. `weights`: the weights of a node that are never updated. `all`: both. "
        "`phase`: both, but optimizer states are copied in as a whole when the update begins, and out when it ends.",
    )
    recompute: str | int | tuple[str, ...] = attr(
        ExtentKind(("none", "full"), "layers", RECOMPUTED),
        "none",
        "Which activations the backward pass recomputes instead of reading what the forward pass stored. `full`: all, "
        "so that only the input of each layer is stored. A number: those of the first layers of each pipeline stage, "
        "of the layers that are trained. A list: those of these parts of each layer: `attention` (or another mixer of "
        "tokens), `mlp` (without experts), `moe` (with experts: router, exchange and experts), `activation` (what "
        "follows the projections gate and up, of MLPs and experts) and `norms`.",
        "the plan chooses",
    )
    activations: str = attr(
        WordsKind(("keep", "offload")),
        "keep",
        "`offload`: the activations that an update stores for the backward pass are in host memory between the two "
        "passes. With `recompute = full`, these activations are the inputs of layers.",
    )
    gradients: str = attr(
        DTYPE,
        "f32",
        "The type in which an update sums the gradients of its micro-batches and of its data-parallel ranks. With "
        "`bf16` each sum is rounded to bfloat16: once per micro-batch, and once more where ranks are summed. Results "
        "then depend on the layout and on `micro_batch`, within these roundings.",
    )
    moments: str = attr(
        DTYPE,
        "f32",
        "The type in which the optimizer states of an update are stored between steps, such as the two moments of "
        "AdamW. With `bf16`, a step computes them in float32 and rounds them to the nearest bfloat16. Masters stay "
        "float32.",
    )
    compile: str = attr(
        WordsKind(("none", "layers")),
        "none",
        "`layers` compiles each layer with torch.compile into fewer, fused kernels. The first passes take up to a "
        "minute longer. Only dense models without `tp` can be compiled.",
    )
    python: str = attr(
        StringKind(),
        "",
        "The Python interpreter of the pool's processes on each host, such as `/opt/vllm/bin/python`. Its environment "
        "may have packages that clash with the packages of other pools "
        "([how](../../guides/engines.md#an-environment-for-a-pool)).",
        "the interpreter of the run",
    )


@dataclass(frozen=True)
class DockOptions(DeclaredAttributes):
    """Options of `dock { … }`.

    `deadline` is in seconds; `capacity` 0 means that rows may use all of the host memory.
    """

    mode: str = attr(
        WordsKind(("distributed", "central")),
        "distributed",
        "`central` uses one warehouse for all hosts, like the usual replay buffer, for comparison.",
    )
    deadline: float = attr(
        TIME,
        600.0,
        "The maximum time for which a node waits while no row is computed, written or assigned on any host. After "
        "this time, the run ends with a report of which process waits for what.",
    )
    capacity: int = attr(
        SIZE,
        0,
        "The host memory that rows may use on each host; the rows that a node waits for must fit (`dock-starves`).",
        "the memory of the host",
    )
    imbalance: float = attr(
        NumericKind(1),
        1.0,
        "The largest share of rows that a data-parallel group may get, as a multiple of an even share. With a larger "
        "number, more rows are computed on the host that has them. With 1, the shares are as even as possible.",
    )
    span: Span = NOWHERE


@dataclass(frozen=True)
class ReshardOptions(DeclaredAttributes):
    """Options of `reshard { … }`. The plan chooses an omitted `order` or `bucket`."""

    mode: str = attr(
        WordsKind(("swap", "naive")),
        "swap",
        "`swap` moves the update's weights to host memory during generation (allgather-swap). `naive` leaves these "
        "weights on the device, for comparison.",
    )
    order: str = attr(
        WordsKind(("direct", "staged")),
        "",
        "`direct` gathers the weights of the generation, and then swaps out the weights of the update. `staged` swaps "
        "out first, and then gathers from host memory, which needs less memory and more time.",
        "the plan chooses",
    )
    bucket: int = attr(SIZE, 0, "The number of bytes that are gathered at one time.", "the plan chooses")
    span: Span = NOWHERE


@dataclass(frozen=True)
class Run(DeclaredAttributes):
    """Options of `run { … }`.

    If `save` is 0, no checkpoint is written. If `resume` is "", the run is new. The `warn_…` options and `max_drift`
    are the thresholds of health_checks.py.
    """

    iterations: int = attr(COUNT, 1, "The number of iterations; `msrl-run --evaluate` runs only the evaluations.")
    seed: int = attr(
        NumericKind(0, 2**53, whole=True),
        0,
        "Decides the order of the data, all sampling, and which rows are in which mini-batch.",
    )
    save: int = attr(
        COUNT, 0, "Writes a checkpoint after every `save` iterations, and after the last iteration.", "none"
    )
    keep: int = attr(COUNT, 2, "The number of newest checkpoints to keep.")
    resume: str = attr(StringKind(), "", "The folder or URL of a run or a checkpoint to resume from.", "")
    listen: str = attr(
        StringKind(),
        "",
        "Where the endpoints of [agents](../../guides/agents.md#the-endpoint) listen: a network interface, such as "
        "`eth1`, or an address of the host.",
        "the host itself, 127.0.0.1",
    )
    restarts: int = attr(
        COUNT_OR_0, 3, "How often processes that died are restarted. If processes die again, the run ends."
    )
    function_workers: int = attr(
        COUNT,
        1,
        "The number of processes per host that call your functions, [each for another row or "
        "group](../../guides/functions.md#parallel-calls). With 1, calls run one after another.",
    )
    on_nan: str = attr(
        WordsKind(("stop", "skip")),
        "stop",
        "The reaction to NaN and infinite numbers. `stop` ends the run. `skip` leaves out the optimizer steps that "
        "such numbers would reach.",
    )
    deterministic: bool = attr(
        FlagKind(),
        False,
        "With `staleness`: an iteration generates with the oldest weights that are allowed, but not with weights from "
        "before the last checkpoint. So a seed gives the same rows even if processes are slow or killed. If it is "
        "false, an iteration generates with the newest weights that are available. Without `staleness`, a run is "
        "always deterministic.",
    )
    warn_flat: int = attr(
        COUNT_OR_0,
        5,
        "Warns after this number of iterations in which, for every prompt, a reward is the same for all responses; 0: "
        "never ([when training goes wrong](../../guides/training_problems.md)).",
    )
    warn_truncated: float = attr(
        NumericKind(0, 1), 0.5, "Warns if more than this share of responses is cut at the maximum length; 1: never."
    )
    warn_entropy: float = attr(
        NumericKind(0, 1), 0.1, "Warns if the entropy falls below this share of its first value; 0: never."
    )
    warn_kl: float = attr(
        NumericKind(0), 1.0, "Warns if `loss/kl` or `clip/kl` exceeds this number of nats per token; 0: never.", "1.0"
    )
    track: tuple[str, ...] = attr(
        TrackersKind(),
        ("tensorboard",),
        "The [trackers](../../guides/tracking.md) that get each line of metrics.jsonl: `tensorboard`, `wandb`, "
        '`mlflow`, `swanlab`, `trackio`, or a class of yours, `"file.py:Class"`.',
    )
    max_drift: float | None = attr(
        NumericKind(0),
        None,
        "The largest drift: the mean difference, in nats per token, between the log-probabilities that trainer and "
        "generator compute with the same weights in an iteration "
        "([`logp_drift`](../../guides/training_problems.md#drift)).",
        "any",
    )
    on_drift: str = attr(
        WordsKind(("warn", "stop")), "warn", "The reaction to more drift than `max_drift`: `warn`, or `stop` the run."
    )
    span: Span = NOWHERE
