"""The house: imports go down only and in no circle, heavy packages stand in the runtime, and compiling loads none of
them."""

import ast
import re
import subprocess
import sys

import networkx as nx
import pytest
from folders import ROOT

from msrl_graph.backends import ENGINES

PACKAGE = ROOT / "msrl_graph"
# From the top down; rooms of one floor do not import each other.
FLOORS = (
    ("cli",),
    ("api",),
    ("reference",),
    ("runtime/calibrate",),
    ("runtime/driver",),
    ("runtime/rank",),
    ("runtime/agents",),
    ("runtime/functions", "runtime/weights"),
    ("runtime/metrics",),
    ("runtime/dock",),
    ("runtime/data",),
    ("runtime/doctor",),
    ("runtime/process",),
    ("compiler",),
    ("simulation", "checks", "builder"),
    ("emit",),
    ("planner", "dsl"),
    ("passes",),
    ("cost",),
    ("backends", "trackers"),
    ("algorithms",),
    ("data",),
    ("analysis",),
    ("ir",),
    ("hardware", "model"),
    ("sharding",),
    ("files", "noise", "tools"),
    ("diagnostics",),
)
FLOOR = {room: i for i, rooms in enumerate(FLOORS) for room in rooms}
AT_MOST = 26  # rooms at the package's root
HEAVY = {
    "networkx",
    "torch",
    "ray",
    "transformers",
    "tokenizers",
    "safetensors",
    "vllm",
    "megatron",
    "tensorboardX",
    "matplotlib",
    "numpy",
    "pyarrow",
    "tensordict",
    "fsspec",
    "aiohttp",
}
FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = {p.relative_to(PACKAGE).with_suffix("").parts for p in FILES}


def room(parts):
    return "/".join(parts[:2]) if parts[0] == "runtime" and len(parts) > 2 else parts[0]


def imports(path):
    """(parts of a module in the package or a name outside, at module level?) of each import; what only types need is
    left out."""
    tree = ast.parse(path.read_text())
    inside = path.relative_to(PACKAGE.parent).with_suffix("").parts
    functions = [f for f in ast.walk(tree) if isinstance(f, (ast.FunctionDef, ast.AsyncFunctionDef))]
    types = [
        i
        for i in ast.walk(tree)
        if isinstance(i, ast.If) and isinstance(i.test, ast.Name) and i.test.id == "TYPE_CHECKING"
    ]
    lazy, typed = ({id(n) for f in some for n in ast.walk(f)} for some in (functions, types))
    for node in ast.walk(tree):
        if id(node) in typed:
            continue
        if isinstance(node, ast.Import):
            for name in node.names:
                yield (name.name,), id(node) not in lazy
        elif isinstance(node, ast.ImportFrom) and node.level:
            base = (*inside[1 : -node.level], *(node.module.split(".") if node.module else ()))
            for name in node.names:
                named = (*base, name.name)
                yield (
                    next(m for m in (named, (*named, "__init__"), base, (*base, "__init__")) if m in MODULES),
                    id(node) not in lazy,
                )
        elif isinstance(node, ast.ImportFrom):
            yield (node.module,), id(node) not in lazy


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down_only(path):
    here = path.relative_to(PACKAGE).with_suffix("").parts
    if here == ("__init__",):  # which hands out what the rooms have
        return
    assert (here[:1] == ("runtime",) and len(here) == 2) or room(here) in FLOOR, (
        f"{room(here)} has no floor: name it in FLOORS"
    )
    for module, _ in imports(path):
        if module in MODULES and room(module) != room(here):
            assert FLOOR[room(here)] < FLOOR[room(module)], f"{'/'.join(here)} imports {'/'.join(module)}"


def test_no_imports_in_a_circle():
    """Those that are made when a function is called too."""
    graph = nx.DiGraph()
    for path in FILES:
        here = path.relative_to(PACKAGE).with_suffix("").parts
        graph.add_edges_from(("/".join(here), "/".join(module)) for module, _ in imports(path) if module in MODULES)
    assert [sorted(circle) for circle in nx.strongly_connected_components(graph) if len(circle) > 1] == []


def test_rooms_are_few():
    rooms = {
        p.name.removesuffix(".py") for p in PACKAGE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()
    } - {"__init__"}
    assert len(rooms) <= AT_MOST and rooms == {name.split("/")[0] for name in FLOOR}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_heavy_packages_are_imported_at_module_level_in_the_runtime_only(path):
    if room(path.relative_to(PACKAGE).with_suffix("").parts).split("/")[0] in ("runtime", "noise"):
        return
    assert not [m for m, top in imports(path) if top and m not in MODULES and m[0].split(".")[0] in HEAVY]


def test_a_check_loads_the_specs_of_engines_only():
    """The halves that run take as long to import as all else of the compiler."""
    code = "import sys; from msrl_graph.cli import compile_main; compile_main(sys.argv[1:]); print(*sys.modules)"
    program = ROOT / "tests" / "programs" / "grpo_page.rlg"
    out = subprocess.run([sys.executable, "-c", code, program, "--check"], capture_output=True, text=True, check=True)
    loaded = set(out.stdout.split())
    running = {spec.build.partition(":")[0] for spec in ENGINES.values()}
    assert len(running) == len(ENGINES) and "msrl_graph.backends" in loaded
    needless = {"msrl_graph.backends.kernels", "msrl_graph.backends.optimizer.steps", "unittest", "asyncio", *HEAVY}
    assert not loaded & (running | needless)


def test_files_stay_short():
    assert {str(p.relative_to(PACKAGE)): n for p in FILES if (n := len(p.read_text().splitlines())) > 420} == {}


# Words of engines, with the files outside of the engines' own in which code may name them, and why.
ENGINE_WORDS = re.compile("vllm|megatron|mindspeed|fsdp", re.IGNORECASE)
OWN_FILES = ("backends/vllm/", "backends/megatron/", "backends/fsdp")
MAY_NAME_ENGINES = {
    "backends/__init__.py": "the table of engines",
    "hardware/stacks.py": "versions that are locked together for a kind of devices, as data for constraints/",
    "dsl/foreign_names.py": "words of other frameworks that a user may write by habit",
    "model/peft_folder.py": "names of settings in files that PEFT writes",
    "ir/options.py": "an example of a path, in a meaning that documentation shows",
}


def named_engines(path):
    """The words of engines in a file's code: not in comments and docstrings."""
    tree = ast.parse(path.read_text())
    documentation = {
        id(item.value) for item in ast.walk(tree) if isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant)
    }
    for item in ast.walk(tree):
        if id(item) not in documentation:
            fields = (value for _, value in ast.iter_fields(item))
            yield from (text for text in fields if isinstance(text, str) and ENGINE_WORDS.search(text))


def test_only_an_engine_names_itself():
    """So the engine of a plug-in gets the same treatment as ours."""
    naming = {
        file: sorted(set(named_engines(path)))
        for path in FILES
        if not (file := path.relative_to(PACKAGE).as_posix()).startswith(OWN_FILES)
    }
    naming = {file: names for file, names in naming.items() if names}
    assert naming.keys() == MAY_NAME_ENGINES.keys(), naming
