"""What our code calls of packages that cannot run here is what they have: each name, call and override is held to what
their own sources say (tests/contracts)."""

import json
import zipfile

import pytest
from contracts import FOLDER, STACKS, Contracts
from modules import of_wheel, package
from place import ROOT
from schemas import bound, stub
from sources import Sources
from theirs import THEIRS
from uses import Uses

PACKAGE = ROOT / "msrl_graph"


@pytest.mark.parametrize("stack", STACKS)
def test_what_we_call_is_there_and_takes_what_we_give(stack):
    uses = Uses(Contracts.of(stack), dict(package(PACKAGE)), THEIRS)
    assert "\n".join(map(str, uses.problems)) == ""
    # What is walked is what there is: of each of these calls are known.
    found = {path.partition("backends/")[2] for path, *_ in uses.calls}
    held = ("kernels/ascend", "devices", "fsdp", "megatron/engine", "megatron/chunk", "vllm/engine", "vllm/core")
    assert found >= {f"{name}.py" for name in held}


# Wrong calls in our own files: what is changed, the file and the text where it is told, and what is told there.
LAUNCHER = "vllm.v1.executor.uniproc_executor.ExecutorWithExternalLauncher"
LATENT = "megatron.core.transformer.transformer_config.MLATransformerConfig"
WRONG = [
    (
        ("vllm/engine.py", "mm_features=None,", ""),
        ("vllm/engine.py", "EngineCoreRequest("),
        "`vllm.v1.engine.EngineCoreRequest` of vllm 0.23.0 is called without `mm_features`",
    ),
    (
        ("vllm/core.py", "disable_log_stats=True", "no_log_stats=True"),
        ("vllm/core.py", "EngineArgs("),
        "`vllm.engine.arg_utils.EngineArgs` of vllm 0.23.0 has no parameter `no_log_stats`",
    ),
    (
        ("megatron/latent_attention.py", '"moe_router_score_function"', '"moe_router_scores"'),
        ("megatron/layer_config.py", "(MLATransformerConfig if"),
        f"`{LATENT}` of megatron-core 0.16.1 has no parameter `moe_router_scores`",
    ),
    (
        ("devices.py", ".wait_event(mark)", ".wait_event(mark, 1)"),
        ("devices.py", ".wait_event(mark, 1)"),
        "`torch_npu.npu.streams.Stream.wait_event` of torch-npu 2.10.0.post4 takes 1 by position, not 2",
    ),
    (
        ("vllm/core.py", "def _distributed_args(self)", "def _distributed_args(self, port)"),
        ("vllm/core.py", "def _distributed_args"),
        f"`_distributed_args(port)` stands for `{LAUNCHER}._distributed_args()` of vllm 0.23.0, "
        "and takes other arguments",
    ),
    (
        ("kernels/ascend.py", "epsilon=epsilon", "eps=epsilon"),
        ("kernels/ascend.py", "npu_rms_norm("),
        "`torch_npu.libtorch_npu.npu_rms_norm` of torch-npu 2.10.0.post4 has no parameter `eps`",
    ),
    (
        ("kernels/ascend.py", '"pre_tockens"', '"pre_tokens"'),
        ("kernels/ascend.py", "npu_fusion_attention("),
        "`torch_npu.libtorch_npu.npu_fusion_attention` of torch-npu 2.10.0.post4 has no parameter `pre_tokens`",
    ),
    (
        ("kernels/ascend.py", "[rows], [weights], group_list=ends", "[rows], [weights], ends"),
        ("kernels/ascend.py", "npu_grouped_matmul("),
        "`torch_npu.libtorch_npu.npu_grouped_matmul` of torch-npu 2.10.0.post4 fits in none of its 2 forms: "
        "one takes 2 by position, not 3",
    ),
    (
        ("kernels/ascend.py", 'rotary_mode="half"', 'mode="half"'),
        ("kernels/ascend.py", "npu_rotary_mul("),
        "`torch_npu.libtorch_npu.npu_rotary_mul` of torch-npu 2.10.0.post4 has no parameter `mode`",
    ),
    (
        ("kernels/ascend.py", "npu_swiglu(joined, dim=-1)", "npu_swiglu(joined, axis=-1)"),
        ("kernels/ascend.py", "npu_swiglu("),
        "`torch_npu.libtorch_npu.npu_swiglu` of torch-npu 2.10.0.post4 has no parameter `axis`",
    ),
    (
        ("devices.py", ".mem_get_info(", ".memory_info("),
        ("devices.py", ".memory_info("),
        "`torch.npu.memory_info` has no contract: run `make contracts`",
    ),
]


@pytest.mark.parametrize(("change", "where", "says"), WRONG, ids=[change[2] or change[1] for change, *_ in WRONG])
def test_a_wrong_call_of_ours_is_told(change, where, says):
    backends = package(PACKAGE / "backends")
    files = {path.partition("backends/")[2]: [module, path, text] for module, (path, text) in backends}
    file, before, after = change
    assert before in files[file][2]
    files[file][2] = files[file][2].replace(before, after)
    uses = Uses(Contracts.of("ascend"), {module: (path, text) for module, path, text in files.values()}, THEIRS)
    _, path, text = files[where[0]]
    line = text[: text.index(where[1])].count("\n") + 1
    assert f"{path}:{line}: {says}" in map(str, uses.problems)


def test_contracts_are_of_the_wheels_of_the_lock():
    lock = (ROOT / "constraints" / "contracts.txt").read_text()
    heads = [json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))]
    locked = [h for h in heads if "commit" not in h]
    said = {f"{h['package']}=={h['version']} --hash=sha256:{h['sha256']}  # {h['file']}" for h in locked}
    assert said == {line for line in lock.splitlines() if not line.startswith("#")}
    assert {h["root"] for h in heads} == {"torch", "torch_npu", "vllm", "vllm_ascend", "megatron", "mindspeed"}


THEIR = {
    "vllm/__init__.py": """
        from .engine import *
        TABLE = {"Late": ".engine:Late"}
        def __getattr__(name): ...
    """,
    "vllm/engine.py": """
        from dataclasses import dataclass, field
        from typing import overload

        @dataclass
        class Sized:
            size: int

        @dataclass
        class Request(Sized):
            name: str = ""
            made: float = field(init=False)
            parts: list = field(default_factory=list)

        class Base:
            def __init__(self, requests: list[Request], *, log=False):
                self.requests = requests

            def step(self, request: Request, wave: int = 0) -> tuple[dict[int, Request], bool]: ...

            @property
            def first(self) -> Request: ...

            def apply(self, logits, state=None): ...

        class Core(Base):
            def chosen(self, kind: "str") -> "Core": ...

        class Late: ...

        @overload
        def zeros(size: int): ...
        @overload
        def zeros(*sizes, out=None): ...
        def zeros(*sizes): ...
    """,
    "vllm/envs.py": "VLLM_KNOWN: bool = False",
}


def dedented(text):
    lines = text.strip("\n").splitlines()
    indent = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    return "\n".join(line[indent:] for line in lines) + "\n"


@pytest.fixture(scope="module")
def their(tmp_path_factory):
    path = tmp_path_factory.mktemp("wheels") / "vllm-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in THEIR.items():
            wheel.writestr(name, dedented(text))
    return Sources({"vllm": of_wheel(path)})


def problems(their, text, names=None, table=None):
    contracts = Contracts({"vllm": "vllm 1.0"}, {} if names is None else names, their if names is None else None)
    uses = Uses(contracts, {"ours": ("ours.py", dedented(text))}, table or {})
    return [str(problem) for problem in uses.problems]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("vllm", "module"),
        ("vllm.Core", "= vllm.engine.Core"),
        ("vllm.Late", "= vllm.engine.Late"),
        ("vllm.engine.Core", "class(requests, *, log=...)"),
        ("vllm.engine.Request", "class(size, name=..., parts=...)"),
        ("vllm.engine.Core.step", "def(request, wave=...) -> tuple[dict[int, vllm.engine.Request], bool]"),
        ("vllm.engine.Core.chosen", "def(kind) -> vllm.engine.Core"),
        ("vllm.engine.Core.first", "value: vllm.engine.Request"),
        ("vllm.engine.Core.requests", "value: list[vllm.engine.Request]"),
        ("vllm.engine.zeros", ["def(size)", "def(*sizes, out=...)"]),
        ("vllm.engine.Core.none", None),
    ],
)
def test_a_line_says_what_the_source_says(their, name, line):
    assert their.line(name) == line


LIBRARY = "\0".join(
    (
        "",
        "npu_norm(Tensor input, float[2] sizes=[1, 2], *, str? how=None, int[]? ends=None) -> (Tensor, Tensor)",
        'npu_norm.out(Tensor(a!) self, float epsilon=1., str way="") -> Tensor[]',
        "npu_inner(Tensor x) -> Tensor",
        "npu_norm(): too few -> 1",
        "get_name",
        "",
    )
)


def test_a_librarys_operators_are_said_as_it_registers_them():
    assert stub(LIBRARY, {"npu_norm"}).splitlines()[2:] == [
        "@overload",
        "def npu_norm(input, sizes=..., *, how=..., ends=...) -> tuple[torch.Tensor, torch.Tensor]: ...",
        "@overload",
        "def npu_norm(self, epsilon=..., way=...) -> list[torch.Tensor]: ...",
    ]


def test_of_a_librarys_class_is_said_what_python_is_given():
    header = "  std::string getName(int rankid, bool init_comm = true);\n  std::string getOther(int rankid);\n"
    assert bound(header, LIBRARY, "Group").splitlines() == [
        "class Group:",
        "    def get_name(self, rankid, init_comm=...): ...",
    ]


RIGHT = """
    import vllm.engine as e
    from importlib import import_module
    from vllm import Core, Late

    BEFORE = import_module("vllm.engine").zeros(1)

    NAMES = {"VLLM_KNOWN": "1"}

    def core(requests) -> object:
        made = Core(requests, log=True)
        return made

    class Holder:
        def __init__(self):
            self.core = core([e.Request(3, name="a")])

        def run(self):
            found, ran = self.core.step(self.core.first)
            for request in found.values():
                request.name
            getattr(self.core, "requests")[0].size
            e.zeros(1, 2, out=None)

    class Own(Core):
        def apply(self, logits, state=None): ...

        def helper(self):
            self.helper()
"""


def test_right_calls_are_right(their):
    assert problems(their, RIGHT) == []


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        (
            "Core(requests, log=True)",
            "Core(log=True)",
            "10: `vllm.engine.Core` of vllm 1.0 is called without `requests`",
        ),
        ("log=True", "logs=True", "10: `vllm.engine.Core` of vllm 1.0 has no parameter `logs`"),
        ("log=True", "True", "10: `vllm.engine.Core` of vllm 1.0 takes 1 by position, not 2"),
        ("log=True", "**{'logs': 1}", "10: `vllm.engine.Core` of vllm 1.0 has no parameter `logs`"),
        (
            "e.Request(3, name",
            "e.Request(name",
            "15: `vllm.engine.Request` of vllm 1.0 is called without `size`",
        ),
        (
            "self.core.first)",
            "1, wave=0, request=2)",
            "18: `vllm.engine.Core.step` of vllm 1.0 is given `request` twice",
        ),
        ("self.core.step(", "self.core.steps(", "18: vllm 1.0 has no `vllm.engine.Core.steps`"),
        ("request.name", "request.names", "20: vllm 1.0 has no `vllm.engine.Request.names`"),
        ('"requests")', '"waiting")', "21: vllm 1.0 has no `vllm.engine.Core.waiting`"),
        ("Core, Late", "Core, Latest", "3: vllm 1.0 has no `vllm.Latest`"),
        ("zeros(1)", "ones(1)", "5: vllm 1.0 has no `vllm.engine.ones`"),
        ("VLLM_KNOWN", "VLLM_UNKNOWN", "7: vllm 1.0 has no `vllm.envs.VLLM_UNKNOWN`"),
        (
            "out=None",
            "into=None",
            "22: `vllm.engine.zeros` of vllm 1.0 fits in none of its 2 forms: one takes 1 by position, not 2",
        ),
        (
            "def apply(self, logits, state=None)",
            "def apply(self, logits)",
            "25: `apply(logits)` stands for `vllm.engine.Core.apply(logits, state=...)` of vllm 1.0, "
            "and takes other arguments",
        ),
        (
            "def apply",
            "def applied",
            "25: `applied` overrides nothing: vllm 1.0 has no `vllm.engine.Core.applied`",
        ),
    ],
)
def test_a_wrong_call_is_told_with_its_place(their, before, after, says):
    assert before in RIGHT
    assert problems(their, RIGHT.replace(before, after)) == [f"ours.py:{says}"]


def test_of_what_was_not_read_it_is_said_what_to_do(their):
    names = {name: their.line(name) for name in ("vllm.Core", "vllm.engine.Core")}
    text = "from vllm import Core\ncore = Core([])\ncore.step(1)\n"
    assert problems(their, text, names) == ["ours.py:3: `vllm.engine.Core.step` has no contract: run `make contracts`"]
    names["vllm.engine.Core.step"] = their.line("vllm.engine.Core.step")
    assert problems(their, text, names) == []


def test_a_table_says_what_no_annotation_does(their):
    text = "from vllm import Core\n\ndef use(core: Core):\n    core.requests.names\n"
    table = {"vllm.engine.Core.requests": ("vllm.engine.Request",)}
    assert problems(their, text) == []
    assert problems(their, text, table=table) == ["ours.py:4: vllm 1.0 has no `vllm.engine.Request.names`"]
