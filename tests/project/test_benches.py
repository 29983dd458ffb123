"""Each bench runs, as tiny as it can be, and ends with the figures that its first lines promise."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location

import pytest
from folders import ROOT

BENCH = ROOT / "bench"
# By its path: names of other benches are those of modules that tests import.
SPEC = spec_from_file_location("bench_smoke", BENCH / "smoke.py")
assert SPEC is not None and SPEC.loader is not None
SPEC.loader.exec_module(smoke := module_from_spec(SPEC))

# Of each bench what its last line has at least.
FIGURES = {
    "adapters": {"transformers apart drift", "transformers merged drift"},
    "asynchrony": {"responses_per_second", "proof_share"},
    "chaos": {"faults", "runs", "finished", "rows_lost", "rows_twice", "differing", "hangs", "leftovers"},
    "compile": {"start", "growth", "networkx", "devices", "bars", "pass"},
    "conformance": {"cells", "logits", "logp", "gradient", "step"},
    "controller": {"rows", "rows_per_second"},
    "corrected": {"held_out_reward"},
    "data": {"forms"},
    "dock": {"payload_mb", "ours"},
    "driver_memory": {"iterations", "bytes_an_iteration", "status"},
    "dry": {"programs", "stale_iterations", "oldest"},
    "engines": {"runs", "outside_most", "bar"},
    "environments": {"rows", "failed", "ran_hostile_code", "wrongly_lost", "wrongly_kept", "processes_left"},
    "families": {"families", "drift", "exported"},
    "functions": {"functions"},
    "gpu": {"aims", "figures", "failed", "left_out"},
    "hosts": {"1"},
    "invariance": {"shuffled arrival"},
    "long_rows": {"8192"},
    "lost_hosts": {"faults", "runs", "finished", "rows_lost", "rows_twice", "hangs", "leftovers"},
    "memory": {"combinations", "largest_deviation", "of"},
    "paper": {"table_1", "equation_3_gb", "figure_7", "figure_9", "figure_10_gb", "figure_11"},
    "phases": {"outside_share_1", "iteration_s_1"},
    "pipelined": {"in step"},
    "planner": {"large_s", "slowest_search_s", "worst_ratio", "pass"},
    "points": {"faults", "runs", "finished", "rows_lost", "rows_twice", "differing", "hangs", "leftovers"},
    "programs": {"rloo"},
    "proof": {"proof_share", "digest_f32_ns", "sum_f32_ns", "digest_bf16_ns", "sum_bf16_ns"},
    "public_recipes": {"recipes", "fit"},
    "real_width": {"peak_deviation", "measuring_cost", "proof_share", "seconds"},
    "reshard": {"gather_fraction_of_bare", "swap_fraction_of_bare", "peak_over_bound", "naive_peak_over_ours"},
    "reshard_engines": {"pairs", "peak_over_plan_most"},
    "router_replay": {"drift"},
    "seconds": {"ratios", "worst", "same_order", "told_apart", "noise"},
    "simulate": {"rows", "seconds_384", "bar", "pass"},
    "staleness": {"iterations", "rows", "oldest", "allowed", "by_age"},
    "startup": {"first_s", "first_cpu_s"},
    "usual_plans": {"cases", "seconds", "planning_processor_s"},
    "trl": {"ours_responses_per_s", "trl_responses_per_s", "ratio"},
}
# What is 0 where all is well, in whatever bench counts it.
NONE_OF = (
    "rows_lost",
    "rows_twice",
    "differing",
    "hangs",
    "leftovers",
    "wrongly_lost",
    "wrongly_kept",
    "processes_left",
)
QUICK = ("compile", "controller", "dry", "functions", "planner", "simulate", "staleness", "usual_plans")
# Of these another bench's smoke goes nearly the same way: make test-long.
LONG = ("asynchrony", "chaos", "conformance", "corrected", "engines", "invariance", "points", "router_replay")
NAMESPACES = ("dock", "hosts", "lost_hosts")
PARTS = {  # files that are no benches, by who takes them
    "disturbed": "chaos",
    "dock_page": "dock",
    "faulty": "environments",
    "gpu_cases": "gpu",
    "gpu_rates": "gpu",
    "shuffled": "invariance",
    "smoke": "functions",
    "stated_lengths": "gpu",
    "trl_side": "trl",
    "with_wheels": "gpu",
}


def test_no_bench_is_without_its_smoke() -> None:
    assert {path.stem for path in BENCH.glob("*.py")} == FIGURES.keys() | PARTS.keys()
    for name in FIGURES:
        tree = ast.parse((BENCH / f"{name}.py").read_text(encoding="utf-8"))
        assert "JSON" in (ast.get_docstring(tree) or ""), f"{name} does not say that its last line is JSON"
        assert "smoke.parse(" in ast.unparse(tree), name
    for part, whole in PARTS.items():
        assert part in (BENCH / f"{whole}.py").read_text(encoding="utf-8"), f"{whole} does not take {part}"


@pytest.mark.parametrize(
    "output", ["", "3.5", "no figures", '{"a": NaN}', '{"a": {"b": [Infinity]}}', '{"a": "b"}', '{"a": 1}\nmore']
)
def test_a_last_line_without_figures_is_refused(output: str) -> None:
    with pytest.raises(ValueError, match="the last line"):
        smoke.figures(output)


def marks(name: str) -> list[pytest.MarkDecorator]:
    return [] if name in QUICK else [pytest.mark.slow, *([pytest.mark.long] if name in LONG else [])]


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in FIGURES])
@pytest.mark.timeout(660)  # a bench of several runs takes minutes beside other tests
def test_a_bench_runs(name: str) -> None:
    if name == "trl" and not (BENCH.parent / ".venv-trl").exists():
        pytest.skip("trl has an environment of its own: make .venv-trl/ready")
    if name in NAMESPACES and os.geteuid():
        pytest.skip("network namespaces need root")
    # One at a time, as all slow tests of a file: some count processes, and each wants both cores.
    command = [sys.executable, str(BENCH / f"{name}.py"), "--smoke"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, f"{ran.stdout[-2000:]}\n{ran.stderr[-4000:]}"
    found = smoke.figures(ran.stdout)
    assert found.keys() >= FIGURES[name], found
    assert not {key: found[key] for key in NONE_OF if found.get(key)}, f"{found}\n{ran.stdout[-4000:]}"
    assert found.get("finished") == found.get("runs") or "finished" not in found
