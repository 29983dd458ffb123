"""What a cluster and the statements of a deploy may say: a declaration for each, with its defaults.

Invariant: as in attributes.py. Where a plan keeps what a statement says (`DockOptions`, `ReshardOptions`, `Run`), it
keeps the declaration itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..diagnostics import NOWHERE, Span
from ..hardware.cluster import DEVICES, NETWORK, Figure
from ..sharding.layout import Layout
from .attribute_schema import DeclaredAttributes, attr
from .attributes import (
    CallAttributes,
    GenerateAttributes,
    InferAttributes,
    ReshardingEdgeAttributes,
    SampleEdgeAttributes,
    SourceAttributes,
    UpdateAttributes,
    WorkerAttributes,
)
from .evaluation import Draw
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
    DrawsKind,
    FlagKind,
    NameKind,
    NumericKind,
    StringKind,
    WordsKind,
)

OF_DEVICE = "of the device"


@dataclass(frozen=True)
class ClusterOptions(DeclaredAttributes):
    """`cluster NAME { … }`. What it states of a device takes the place of the preset's figure."""

    device: str = attr(
        StringKind(known=tuple(DEVICES)),
        "",
        (
            'A preset: see below. `"here"` is the machine at hand, as `msrl-doctor --calibrate` measured it; `"cpu"` '
            "an assumed one."
        ),
        must='"cpu"',
    )
    nodes: int = attr(COUNT, 1, "Hosts.")
    devices_per_node: int = attr(COUNT, 1, "Devices of a host. On CPUs a device is a process with one core.")
    network: Figure | float = attr(
        RATE,
        NETWORK,
        "Between two hosts, each way, what is reached: what rows and, without `fabric`, collectives go over.",
    )
    interface: str = attr(
        StringKind(),
        "",
        "The network interface by which ranks of different hosts speak, as `eth1`; the same name on every host.",
        "that of Ray's address of the host",
    )
    memory: float | None = attr(BYTES, None, "Of a device.", OF_DEVICE)
    memory_bandwidth: float | None = attr(RATE, None, "Of a device's memory.", OF_DEVICE)
    host_link: float | None = attr(RATE, None, "Between a device and its host's memory, one way.", OF_DEVICE)
    device_link: float | None = attr(RATE, None, "Between devices of a host, one way, a device.", OF_DEVICE)
    fabric: float | None = attr(
        RATE,
        None,
        "Between hosts, a device: what collectives go over. A device without one uses `network`.",
        OF_DEVICE,
    )
    host_memory: float | None = attr(BYTES, None, "Of a host, shared by its devices.", OF_DEVICE)
    flops_bf16: float | None = attr(FLOPS, None, "Of a device in bfloat16.", OF_DEVICE)
    flops_f32: float | None = attr(FLOPS, None, "Of a device in float32.", OF_DEVICE)
    launch: float | None = attr(TIME, None, "The least that one kernel (on a CPU one operator) takes.", OF_DEVICE)


@dataclass(frozen=True)
class ModelOptions(DeclaredAttributes):
    """`model NAME = "…" { … }`."""

    dtype: str | None = attr(DTYPE, None, "The type of the weights.", "of the config")


@dataclass(frozen=True)
class LayoutOptions(DeclaredAttributes):
    """`layout NODES { … }`. A `dp` of 0 is left to the placement, an `etp` of 0 to the engine."""

    tp: int = attr(COUNT, Layout.tp, "Tensor parallelism: divides matrices and heads.")
    cp: int = attr(COUNT, Layout.cp, "Context parallelism: divides sequences.")
    pp: int = attr(NumericKind(1, 10_000, whole=True), Layout.pp, "Pipeline parallelism: divides layers into stages.")
    dp: int = attr(COUNT, 0, "Data parallelism: divides rows.", "what the pool leaves")
    ep: int = attr(COUNT, Layout.ep, "Expert parallelism: whole experts over the ranks of a stage (tp · cp · dp).")
    etp: int = attr(
        COUNT, 0, "Tensor parallelism of each expert, over the same ranks.", "as the engine has it: see below"
    )
    vpp: int = attr(
        NumericKind(1, 100, whole=True),
        Layout.vpp,
        "Interleaved stages: so many chunks of layers on each stage.",
    )
    stages: tuple[int, ...] = attr(
        CountsKind(), Layout.stages, "Layers of each of the pp · vpp chunks, in order.", "even"
    )
    zero: int = attr(
        NumericKind(0, 3, whole=True),
        Layout.zero,
        "ZeRO over dp: 0 divides nothing, 1 the optimizer, 2 gradients too, 3 weights too (arXiv:1910.02054).",
    )
    cp_kind: str = attr(WordsKind(("ring", "ulysses")), Layout.cp_kind, "How attention passes over divided sequences.")


@dataclass(frozen=True)
class EngineOptions(DeclaredAttributes):
    """`engine NODES = NAME { … }`: the options of all engines; each names those that it has."""

    dtype: str | None = attr(DTYPE, None, "The type that it computes in.", "of the model")
    memory: float = attr(SHARE, 0.9, "The part of a device's memory that a generator may use, its weights included.")
    micro_batch: int | None = attr(
        COUNT,
        None,
        "Rows (of a generator: prompts) that a rank computes at once. It changes no result: a term of a loss "
        "gives each row what the row alone says, which a run tries before it begins, or is of the whole "
        "mini-batch, which then is passed over once more.",
        "what memory allows",
    )
    offload: str = attr(
        WordsKind(("none", "optimizer", "weights", "all")),
        "none",
        "What lies in host memory when it is not at work: the optimizer's states of an update, the weights of a "
        "state that nothing updates.",
    )
    recompute: str = attr(
        WordsKind(("none", "full")),
        "none",
        "`full` computes activations again in the backward pass and keeps only each layer's input.",
        "the plan chooses",
    )
    activations: str = attr(
        WordsKind(("keep", "offload")),
        "keep",
        "`offload`: what an update's layers keep for the backward pass (with `recompute = full` their inputs) lies in "
        "host memory in between.",
    )
    compile: str = attr(
        WordsKind(("none", "layers")),
        "none",
        "`layers`: each layer by torch.compile, in fewer and fused kernels; the first passes take up to a minute "
        "longer. Of dense models, and not with `tp`.",
    )
    python: str = attr(
        StringKind(),
        "",
        "The interpreter of the pool's processes on each host, as `/opt/vllm/bin/python`: an environment of its own, "
        "for packages that cannot be beside those of other pools ([engines](engines.md)).",
        "the run's own",
    )


@dataclass(frozen=True)
class DockOptions(DeclaredAttributes):
    """`dock { … }`. A `deadline` is in seconds; a `capacity` of 0 is what the host's memory holds."""

    mode: str = attr(
        WordsKind(("distributed", "central")),
        "distributed",
        "`central` is one warehouse for all hosts, the conventional replay buffer, for comparison.",
    )
    deadline: float = attr(
        TIME,
        600.0,
        "How long a wait may last, from when a row was last computed, written or handed out on any host, before the "
        "run ends with who waits for what.",
    )
    capacity: int = attr(
        SIZE,
        0,
        "Bytes of host memory that rows may take on each host; what a node waits for must fit (`dock-starves`).",
        "none",
    )
    imbalance: float = attr(
        NumericKind(1),
        1.0,
        (
            "How many times an even share a group may get, for rows to be computed on the host that has them; 1: "
            "as even as can be."
        ),
    )
    span: Span = NOWHERE


@dataclass(frozen=True)
class ReshardOptions(DeclaredAttributes):
    """`reshard { … }`. An `order` of "" and a `bucket` of 0 are the plan's to choose."""

    mode: str = attr(
        WordsKind(("swap", "naive")),
        "swap",
        (
            "`swap` takes the update's weights to host memory while others generate (allgather-swap); `naive` keeps "
            "them, for comparison."
        ),
    )
    order: str = attr(
        WordsKind(("direct", "staged")),
        "",
        "`direct` gathers, then swaps out; `staged` swaps out, then gathers from the host: less memory, more time.",
        "the plan chooses",
    )
    bucket: int = attr(SIZE, 0, "Bytes that are gathered at once.", "the plan chooses")
    span: Span = NOWHERE


@dataclass(frozen=True)
class EvaluateOptions(DeclaredAttributes):
    """`evaluate NAME { … }`. `data` "": those of its name; `every` 0: never in between; `samples` 0 and `temperature`
    None: as in training."""

    data: str = attr(
        NameKind(),
        "",
        "The data that it is on. Several evaluations, each with a name of its own, may be on the same data.",
        "the data of its name",
    )
    report: tuple[str, ...] = attr(
        NameKind(several=True),
        (),
        (
            "Columns whose means are written: `f32` numbers of a row that a function, an environment or a reward "
            "model writes."
        ),
        must="reward",
    )
    every: int = attr(COUNT, 0, "Also after every so many-th iteration.", "only before and after")
    samples: int = attr(
        COUNT,
        0,
        "Responses to each prompt, of all generations that read the source's columns alone; one that reads another's "
        "text draws as in training, unless `draws` names it.",
        "as in training",
    )
    temperature: float | None = attr(
        NumericKind(0),
        None,
        "Of the same generations; 0 takes the likeliest token.",
        "as in training",
    )
    draws: tuple[Draw, ...] = attr(
        DrawsKind(),
        (),
        "Settings of single generations, as `[draw(critic.generate, samples = 2, temperature = 0)]`; what one leaves "
        "out is as without it.",
        "none",
    )
    at: tuple[int, ...] = attr(
        CountsKind(),
        (),
        "The k of `pass@k` and `best@k`, and with `vote` of `maj@k`, of each reported column "
        "([metrics](metrics.md)); at most as many as a prompt has responses.",
        "none",
    )
    passing: float = attr(
        NumericKind(), 1.0, "A response passes where the reported column is this or more, for `pass@k`."
    )
    vote: str = attr(
        NameKind(),
        "",
        "The column with the answer of each response, text or a number, that `maj@k` takes the most frequent of.",
        "none",
    )
    by: str = attr(
        NameKind(),
        "",
        "A column of the source, as `data_source`: each figure for the rows of each of its values too, at most 100.",
        "none",
    )
    label: str = attr(
        StringKind(),
        "",
        "What the curve and the last lines call it; of several columns, the first.",
        "`COLUMN on NAME`",
    )
    best: str = attr(
        StringKind(),
        "",
        'A figure of this evaluation, as `"reward"` or `"reward/pass@8"`: the checkpoint with the best one is '
        "[written and kept](running.md#the-best-checkpoint).",
        "none",
    )
    goal: str = attr(WordsKind(("maximize", "minimize")), "maximize", "Which value of the figure `best` is better.")
    patience: int = attr(
        COUNT,
        0,
        "The training ends when so many evaluations in a row gave no better figure `best`.",
        "never",
    )


@dataclass(frozen=True)
class Run(DeclaredAttributes):
    """`run { … }`. `save` 0: no checkpoint; `resume` "": a new run. The `warn_…` and `max_drift` are the thresholds of
    health_checks.py."""

    iterations: int = attr(COUNT, 1, "How many; `msrl-run --evaluate` does the evaluations alone.")
    seed: int = attr(
        NumericKind(0, 2**53, whole=True),
        0,
        "Decides the order of the data, what is drawn, and who belongs to which mini-batch.",
    )
    save: int = attr(COUNT, 0, "A checkpoint every so many iterations, and after the last.", "none")
    keep: int = attr(COUNT, 2, "How many of the newest checkpoints stay.")
    resume: str = attr(StringKind(), "", "The folder of a run or a checkpoint to go on from, or its URL.", "")
    listen: str = attr(
        StringKind(),
        "",
        "Where the endpoints of [agents](agents.md) listen: an interface, as `eth1`, or an address of the host.",
        "the host's own, 127.0.0.1",
    )
    restarts: int = attr(COUNT_OR_0, 3, "How often processes that died are started anew before the run ends.")
    function_workers: int = attr(
        COUNT,
        1,
        "Processes of each host that call your functions, "
        "[each for another row or group](functions.md); 1: one after another.",
    )
    on_nan: str = attr(
        WordsKind(("stop", "skip")),
        "stop",
        "What a wrong number does: `stop` ends the run, `skip` leaves out the optimizer steps that it would reach.",
    )
    deterministic: bool = attr(
        FlagKind(),
        False,
        "With `staleness`: an iteration generates with weights as old as they may be, but none from before the last "
        "checkpoint, so that a seed gives the same rows, whoever is slow and whatever is killed. Else it takes the "
        "newest that are there. Without `staleness` a run is deterministic anyway.",
    )
    warn_flat: int = attr(
        COUNT_OR_0,
        5,
        "After so many iterations in which a reward is the same for all responses to a prompt, of every prompt, a "
        "run warns; 0: never ([when a run goes wrong](metrics.md)).",
    )
    warn_truncated: float = attr(
        NumericKind(0, 1),
        0.5,
        "It warns where more of the responses are cut at their bound; 1: never.",
    )
    warn_entropy: float = attr(
        NumericKind(0, 1),
        0.1,
        "It warns where the entropy falls below this part of what it was at first; 0: never.",
    )
    warn_kl: float = attr(
        NumericKind(0),
        1.0,
        "It warns where `loss/kl` or `clip/kl` is more nats a token; 0: never.",
        "1.0",
    )
    max_drift: float | None = attr(
        NumericKind(0),
        None,
        "The most that the log-probabilities of trainer and generator, with the same weights, may differ in an "
        "iteration: nats a token, on average (`logp_drift`, [metrics](metrics.md)).",
        "any",
    )
    on_drift: str = attr(
        WordsKind(("warn", "stop")), "warn", "What more than `max_drift` does: `warn`, or `stop` the run."
    )
    span: Span = NOWHERE


# Each statement's, by the name that messages and the reference call it by.
STATEMENTS: dict[str, type[DeclaredAttributes]] = {
    "worker": WorkerAttributes,
    "source": SourceAttributes,
    "generate": GenerateAttributes,
    "infer": InferAttributes,
    "update": UpdateAttributes,
    "function": CallAttributes,
    "sample edge": SampleEdgeAttributes,
    "resharding edge": ReshardingEdgeAttributes,
    "cluster": ClusterOptions,
    "model": ModelOptions,
    "layout": LayoutOptions,
    "engine": EngineOptions,
    "dock": DockOptions,
    "reshard": ReshardOptions,
    "evaluate": EvaluateOptions,
    "run": Run,
}
