"""The house: imports go down only, heavy packages stand in the runtime, and compiling loads none of them."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "msrl_graph"
# From the top down; parts of one floor do not import each other.
FLOORS = (
    ("doctor", "fmt"),
    ("cli", "api"),
    ("cli_run",),
    ("cli_shared",),
    ("reference",),
    ("pipeline", "runtime"),
    ("unready", "asked"),
    ("simulation", "builder"),
    ("dsl", "checks", "passes", "emit", "backends"),
    ("algorithms",),
    (
        *("graph", "dividing", "work", "plan", "searched", "calibration", "cluster", "redistribute", "layout", "models", "engine"),
        *("references", "functions", "closed_forms", "noise", "views", "stretch", "architecture", "sequences", "rowsets", "dropped"),
        *("stepping", "located", "config", "chat", "reading", "datafile"),
    ),
    ("diagnostics",),
    ("codes", "paths", "shown"),
)
GROUND_FLOOR = next(i for i, names in enumerate(FLOORS) if "graph" in names)
# Within the ground floor, who may stand on whom.
GROUND = (
    *(
        "references",
        "located",
        "datafile",
        "models",
        "dividing",
        "work",
        "plan",
        "architecture",
        "searched",
        "engine",
        "stepping",
        "sequences",
        "rowsets",
        "graph",
        "redistribute",
        "layout",
    ),
    *("calibration", "cluster", "functions", "closed_forms", "noise", "views", "stretch", "dropped", "config", "chat", "reading"),
)

HEAVY = {"torch", "ray", "transformers", "tokenizers", "safetensors", "vllm", "megatron", "tensorboardX", "matplotlib", "numpy", "pyarrow"}
FILES = sorted(PACKAGE.rglob("*.py"))


def part(path):
    inside = path.relative_to(PACKAGE).parts
    return inside[0].removesuffix(".py")


def imports(path):
    """(module as a dotted path from the package's root or outside, at module level?) of each import."""
    tree = ast.parse(path.read_text())
    inside = path.relative_to(PACKAGE.parent).with_suffix("").parts
    functions = [f for f in ast.walk(tree) if isinstance(f, (ast.FunctionDef, ast.AsyncFunctionDef))]
    types = [i for i in ast.walk(tree) if isinstance(i, ast.If) and isinstance(i.test, ast.Name) and i.test.id == "TYPE_CHECKING"]
    lazy = {id(n) for f in (*functions, *types) for n in ast.walk(f)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield name.name, id(node) not in lazy
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = inside[: -node.level]
                for name in node.names:
                    yield ".".join((*base, *(node.module or name.name).split("."))), id(node) not in lazy
            else:
                yield node.module, id(node) not in lazy


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down_only(path):
    floor = {name: i for i, names in enumerate(FLOORS) for name in names}
    here = part(path)
    if here == "__init__":
        return
    assert here in floor, f"{here} has no floor: name it in FLOORS"
    for module, at_once in imports(path):
        if not module.startswith("msrl_graph.") or (here == "views" and not at_once):
            continue
        there = module.split(".")[1]
        if there == here:
            continue
        if floor[here] == floor[there] == GROUND_FLOOR:
            assert GROUND.index(here) < GROUND.index(there), f"{path.name} imports {module}"
            continue
        assert floor[here] < floor[there], f"{path.relative_to(PACKAGE)} imports {module}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_heavy_packages_are_imported_at_module_level_in_the_runtime_only(path):
    if part(path) in ("runtime", "noise"):
        return
    found = [m for m, top in imports(path) if top and m.split(".")[0] in HEAVY]
    assert not found


def test_files_stay_short():
    assert {str(p.relative_to(PACKAGE)): n for p in FILES if (n := len(p.read_text().splitlines())) > 420} == {}
