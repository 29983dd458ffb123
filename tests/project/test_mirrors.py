"""Tests of a module: tests/<room>/test_<module>.py, or the file that the table names for a module of some size.

A module of the package that nobody tests, or whose tests nobody finds, fails here.
"""

import ast
import re
from functools import cache

import pytest
from folders import ROOT, TESTS

PACKAGE = ROOT / "msrl_graph"
LONG = 100  # lines of a module from which on it needs tests of its own, or a place in the table
# The test file of each long module without a mirror; it imports or names the module, or what is directly above it.
COVERED = {
    "algorithms/test_judges.py": ("algorithms/answers", "algorithms/judge", "algorithms/registry"),
    "backends/kernels/test_kernels.py": (
        "backends/kernels/ascend",
        "backends/kernels/chunked_attention",
        "backends/kernels/modules",
    ),
    "backends/optimizer/test_steps.py": (
        "algorithms/optimizers",
        "backends/optimizer/muon",
        "backends/optimizer/shards",
        "ir/optimizer_spec",
    ),
    "backends/test_context_parallel.py": ("backends/fsdp", "backends/ring_attention"),
    "backends/test_expert_placement.py": ("backends/experts",),
    "backends/test_hf.py": ("backends/hf_modules",),
    "backends/test_recorded_npu.py": ("backends/devices",),
    "backends/test_operators.py": ("runtime/calibrate/probes",),
    "backends/vllm/test_memory.py": ("backends/vllm/core", "backends/vllm/spec"),
    "builder/test_programs.py": ("builder/callsite", "builder/statements"),
    "compiler/test_loading.py": ("compiler/to_program",),
    "compiler/test_same_bytes.py": ("compiler/sources",),
    "cli/test_any_input.py": ("cli/common", "compiler/pipeline", "dsl/ast"),
    "cost/test_time.py": ("cost/backward", "cost/operators", "passes/estimate"),
    "planner/test_kv_cache.py": ("cost/kv_cache",),
    "runtime/data/test_tokens.py": ("runtime/data/dataset_preview",),
    "diagnostics/test_diagnostics.py": (
        "checks/table",
        "checks/columns",
        "checks/edges",
        "checks/filters",
        "checks/layout",
        "checks/optimizers",
        "checks/scope",
        "checks/sharing",
        "checks/staleness",
        "checks/states",
        "checks/terms",
        "checks/verb_columns",
        "checks/weights",
        "dsl/algorithm",
        "dsl/attributes",
        "dsl/calls",
        "dsl/declarations",
        "dsl/deploy",
        "dsl/environments",
        "dsl/evaluations",
        "dsl/expressions",
        "dsl/node_calls",
        "dsl/params",
        "dsl/placement",
        "dsl/syntax_errors",
    ),
    "ir/test_metrics.py": ("ir/iteration_metrics",),
    "dsl/test_lower.py": ("hardware/cluster", "ir/evaluation", "ir/graph", "ir/options"),
    "emit/test_diff.py": ("emit/facts",),
    "emit/test_picture.py": ("emit/html", "emit/layered_layout", "emit/svg"),
    "files/test_urls.py": ("runtime/driver/distributed_checkpoint",),
    "hardware/test_device_presets.py": ("hardware/other_devices",),
    "hardware/test_calibration.py": ("cli/doctor", "runtime/calibrate/measure"),
    "analysis/test_async_schedule.py": (
        "analysis/pools_in_step",
        "runtime/driver/async_driver",
        "runtime/driver/iterations",
    ),
    "ir/test_attributes.py": ("ir/attribute_schema", "ir/kinds"),
    "model/test_fields.py": ("checks/folders",),
    "model/test_models.py": (
        "model/architecture",
        "model/families/deepseek_v3",
        "model/mlps",
        "runtime/driver/preflight",
    ),
    "passes/test_verify.py": (
        "compiler/plan_names",
        "ir/instruction",
        "ir/plan",
        "passes/dock",
        "passes/place",
        "passes/spec",
    ),
    "emit/test_text.py": ("passes/reshard_section",),
    "passes/test_passes.py": ("checks/memory", "passes/memory", "passes/throughput", "passes/traffic"),
    "passes/test_schedule.py": ("analysis/rowsets",),
    "planner/test_search.py": (
        "backends/divisibility",
        "emit/search_report",
        "ir/search_record",
        "planner/advice",
        "planner/candidates",
        "planner/place",
        "planner/search_space",
        "planner/simplest",
    ),
    "reference/test_reference.py": ("reference/facts",),
    "runtime/agents/test_agent_runner.py": ("runtime/agents/rank_protocol",),
    "runtime/driver/test_export.py": ("runtime/weights/hf_export",),
    "scenarios/python/test_plug_ins.py": ("files/plugins",),
    "scenarios/agents/test_calculator_run.py": ("runtime/agents/agent_process",),
    "scenarios/agents/test_sampled_rows.py": ("runtime/rank/agent_generation",),
    "runtime/agents/test_conversations.py": ("runtime/agents/api_types", "runtime/agents/template"),
    "model/test_mamba.py": (
        "model/families/hybrid/granitemoehybrid",
        "model/families/hybrid/nemotron_h",
        "model/mamba_presets",
    ),
    "model/test_layers.py": ("ir/workload", "model/mixers"),
    "runtime/data/test_numerics.py": ("runtime/data/columns", "runtime/dock/readers"),
    "runtime/data/test_encoding.py": ("runtime/dock/messages", "runtime/process/task", "runtime/process/task_report"),
    "runtime/dock/test_controller.py": (
        "runtime/dock/client",
        "runtime/dock/progress",
        "runtime/dock/row_tables",
        "runtime/dock/warehouse",
    ),
    "runtime/dock/test_rpc.py": ("runtime/dock/wire_format",),
    "runtime/dock/test_segments.py": ("runtime/dock/segment_file",),
    "runtime/doctor/test_machine.py": (
        "runtime/doctor/ascend",
        "runtime/doctor/cuda",
        "runtime/doctor/host",
        "runtime/doctor/hosts",
        "runtime/doctor/output_parsers",
        "runtime/doctor/program",
    ),
    "runtime/driver/test_cluster_probe.py": (
        "runtime/driver/device_reservation",
        "runtime/process/host_facts",
    ),
    "runtime/driver/test_resume.py": (
        "runtime/driver/outcome",
        "runtime/metrics/metrics_file",
        "runtime/weights/checkpoint_parts",
    ),
    "runtime/driver/test_run_folder.py": (
        "runtime/driver/attempt",
        "runtime/driver/remote_folder",
        "runtime/driver/supervisor",
    ),
    "scenarios/faults/test_kills.py": ("runtime/driver/process_pool",),
    "runtime/process/test_interpreters.py": ("data/plan_paths",),
    "runtime/driver/test_run_state.py": ("runtime/driver/adaptive_draw",),
    "runtime/functions/test_host.py": ("runtime/driver/function_hosts", "runtime/functions/crash_journal"),
    "runtime/functions/test_own_process.py": (
        "runtime/functions/fork_client",
        "runtime/functions/fork_server",
        "runtime/functions/instances",
    ),
    "runtime/functions/test_units.py": ("runtime/functions/draw_weights",),
    "runtime/metrics/test_recorder.py": ("runtime/metrics/comparison", "runtime/metrics/display"),
    "runtime/metrics/test_run_status.py": (
        "runtime/metrics/http_server",
        "runtime/metrics/prometheus",
        "runtime/metrics/terminal_panel",
    ),
    "runtime/metrics/test_tracking.py": (
        "runtime/metrics/tracker_main",
        "runtime/metrics/tracker_process",
        "trackers/__init__",
        "trackers/mlflow",
    ),
    "runtime/functions/test_environments.py": ("runtime/rank/multi_turn",),
    "runtime/process/test_memory.py": (
        "backends/activations",
        "backends/memory/layer_sizes",
        "backends/memory/pass_sizes",
        "backends/memory/trainer",
    ),
    "runtime/process/test_shipped_files.py": ("runtime/driver/user_modules",),
    "runtime/rank/test_loss.py": ("runtime/rank/joint_loss",),
    "runtime/rank/test_scores.py": ("backends/memory/sizes", "analysis/sequences"),
    "runtime/rank/test_partial_rollout.py": ("runtime/rank/rollout",),
    "runtime/rank/test_training.py": (
        "runtime/rank/checkpoints",
        "runtime/rank/generation",
        "runtime/rank/micro_batches",
    ),
    "runtime/weights/test_delivery_check.py": (
        "runtime/rank/context",
        "runtime/rank/rank",
        "runtime/rank/weight_proof",
        "runtime/weights/digest",
    ),
    "runtime/weights/test_reshard.py": ("passes/reshard",),
    "runtime/weights/test_weight_send.py": ("runtime/weights/weight_publication",),
    "scenarios/clusters/test_joining.py": ("runtime/driver/dock_monitor",),
    "scenarios/engines/test_own_engine.py": (
        "backends/engine_protocols",
        "backends/spec",
        "compiler/unsupported",
        "runtime/rank/engines",
    ),
    "scenarios/environments/test_dialogue.py": ("runtime/rank/environment_turns",),
    "scenarios/faults/test_hangs.py": ("runtime/driver/driver", "runtime/driver/watchdog"),
    "scenarios/staleness/test_states.py": ("runtime/driver/function_tasks",),
    "scenarios/strangers/test_files.py": ("files/private",),
    "sharding/test_redistribute.py": ("sharding/host_counts",),
    "simulation/test_simulation.py": (
        "cost/transfers",
        "simulation/assumptions",
        "simulation/driver",
        "simulation/flow",
        "simulation/generation",
        "simulation/nodes",
        "simulation/result",
        "simulation/rollout",
        "simulation/rows",
        "simulation/run",
        "simulation/text",
    ),
    "test_api.py": ("builder/pickled_functions",),
    "with_engines/test_engine_operators.py": (
        "backends/megatron/chunk",
        "backends/megatron/engine",
        "backends/vllm/engine",
    ),
    "with_engines/test_experts.py": ("backends/megatron/cpu",),
    "with_engines/test_vllm.py": ("backends/vllm/route_capture",),
    "with_engines/test_megatron.py": (
        "backends/megatron/spec",
        "backends/megatron/latent_attention",
        "backends/megatron/peaks",
        "backends/megatron/stage_adapters",
        "backends/megatron/stage_recompute",
        "backends/megatron/stage_sizes",
    ),
}
MODULES = {str(path.relative_to(PACKAGE).with_suffix("")): path for path in PACKAGE.rglob("*.py")}
FILE = re.compile(r"([\w/]+)\.py\b")
DOTTED = re.compile(r"\bmsrl_graph\.([\w.]+)")
ENTRIES = [(module, test) for test, modules in COVERED.items() for module in modules]


def mirror(module):
    """The file of a module's own tests; those of `__init__` are all of the room."""
    room, _, name = module.rpartition("/")
    return TESTS / room / (f"test_{name}.py" if name != "__init__" else "test_*.py")


def has_mirror(module):
    own = mirror(module)
    folder = TESTS / module
    return any(own.parent.glob(own.name)) or any(folder.glob("test_*.py"))


def resolve(*names):
    """The module of a dotted name, whose last part may be something in it."""
    parts = [part for name in names if name for part in name.split(".")]
    for length in (len(parts), len(parts) - 1):
        base = "/".join(parts[:length])
        for module in (base, f"{base}/__init__".strip("/")):
            if module in MODULES:
                return module
    return None


@cache
def imports(path):
    """Modules of the package and support modules that a file imports, or names in a string."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    own = path.relative_to(PACKAGE).parts if path.is_relative_to(PACKAGE) else ()
    modules = set()
    support = set()
    for item in ast.walk(tree):
        if isinstance(item, ast.Import):
            support |= {alias.name for alias in item.names}
            modules |= {resolve(alias.name.partition(".")[2]) for alias in item.names if "msrl_graph." in alias.name}
        elif isinstance(item, ast.ImportFrom) and (item.level or (item.module or "").split(".")[0] == "msrl_graph"):
            base = own[: -item.level] if item.level else ()
            module = item.module if item.level else item.module.partition(".")[2]
            modules |= {resolve(*base, module, alias.name) for alias in item.names}
        elif isinstance(item, ast.ImportFrom):
            support.add(item.module)
        elif isinstance(item, ast.Constant) and isinstance(item.value, str):
            modules |= {name if name in MODULES else None for name in FILE.findall(item.value)}
            modules |= {resolve(name) for name in DOTTED.findall(item.value)}
    return modules - {None}, {path for name in support if (path := TESTS / "support" / f"{name}.py").is_file()}


def used(test):
    """Modules that a test imports or names itself, or through its support modules."""
    modules = set()
    left = [test]
    seen = set()
    while left:
        seen.add(path := left.pop())
        own, support = imports(path)
        modules |= own
        left += support - seen
    return modules


@cache
def reached(test):
    """`used`, and what each of them imports, directly or through modules of its own room."""
    modules = used(test)
    modules |= {below for module in modules for below in imports(MODULES[module])[0]}
    left = list(modules)
    while left:
        module = left.pop()
        room = module.rpartition("/")[0]
        more = {below for below in imports(MODULES[module])[0] if below.rpartition("/")[0] == room} - modules
        modules |= more
        left += more
    return modules


def test_every_long_module_has_its_tests():
    lengths = {module: len(path.read_text(encoding="utf-8").splitlines()) for module, path in MODULES.items()}
    listed = {module for module, _ in ENTRIES}
    missing = [
        f"{module}.py: add {mirror(module).relative_to(ROOT)}, or its module to COVERED, at the test that covers it"
        for module, lines in sorted(lengths.items())
        if lines > LONG and module not in listed and not has_mirror(module)
    ]
    assert not missing, "\n".join(missing)


def test_the_table_has_no_more_than_it_needs():
    listed = [module for module, _ in ENTRIES]
    assert len(listed) == len({*listed}), "a module is in COVERED once"
    gone = [module for module in listed if module not in MODULES]
    assert not gone, f"take these out of COVERED, since there is no such module: {gone}"
    mirrored = [module for module in listed if has_mirror(module)]
    assert not mirrored, f"take these out of COVERED, since they have tests of their own: {mirrored}"


@pytest.mark.parametrize(("module", "test"), ENTRIES, ids=[module for module, _ in ENTRIES])
def test_the_named_test_is_about_the_module(module, test):
    assert (TESTS / test).is_file(), f"there is no tests/{test}: name the file that covers {module}.py"
    assert module in reached(TESTS / test), (
        f"tests/{test} does not import {module}.py, nor what is directly above it: name another file, or name the "
        "module in its docstring"
    )
