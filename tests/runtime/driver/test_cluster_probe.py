"""What is told of the hosts of a cluster before a run starts there, and what is shipped to them."""

import os
import subprocess
import sys
import textwrap
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from place import EXAMPLE

from msrl_graph import compile
from msrl_graph.diagnostics import Fault
from msrl_graph.hardware.environment_variables import Setting
from msrl_graph.ir.plan import ProcessEnvironment
from msrl_graph.runtime.driver import shipping, user_modules
from msrl_graph.runtime.driver.cluster_probe import Hosts
from msrl_graph.runtime.process import host_facts, interpreters
from msrl_graph.runtime.process.cluster_join import NoResources
from msrl_graph.runtime.process.shipped_files import ShippedFile

FILES = {"model policy": ["/m/config.json", "/m/model.safetensors"], "data source": ["/train.jsonl"]}
SIZES = {"/m/config.json": 700, "/m/model.safetensors": 5000, "/train.jsonl": 90, "/out/.mark": 0}
DIGESTS = {path: f"of {path}, {size}" for path, size in SIZES.items()}
FACTS = host_facts.HostFacts(
    name="node-a",
    versions={"Python": "3.11.7", "msrl-graph": "0.1.0 0a1b2c3d", "torch": "2.13.0+cpu", "numpy": "2.4.6"},
    others={},
    sizes=SIZES,
    digests=DIGESTS,
    cores=8,
    devices=0,
    variables={},
    memory=12 << 30,
    total=16 << 30,
    shared=8 << 30,
    interface="eth0",
    speaks="10.0.0.1",
    interfaces=["eth0", "lo"],
)


@pytest.fixture(scope="module")
def plan():
    return compile("grpo", model="tiny", sets=dict.fromkeys(("prompts", "group", "prompt_len", "response_len"), "8"))


def hosts(plan, *others, clocks=None):
    """A cluster of the first host, which is as it should be, and others."""
    seen = [FACTS, *({**FACTS, "name": f"node-{'bcdef'[i]}", **other} for i, other in enumerate(others))]
    return Hosts(
        replace(plan, cluster=replace(plan.cluster, nodes=len(seen))),
        [],
        [f"10.0.0.{i + 1}" for i in range(len(seen))],
        [FILES, *({"model policy": FILES["model policy"]} for _ in others)],
        seen,
        FACTS,
        clocks or [0.0] * len(seen),
        [[i for i, found in enumerate(seen) if found["sizes"]["/out/.mark"] < 0]],
    )


def refused(hosts):
    with pytest.raises(NoResources) as caught:
        hosts.judge(verbose=False)
    (told,) = caught.value.diagnostics
    return f"{told.code}: {told.message}\n= {told.help}".split("\n")


def test_hosts_that_agree_are_not_told_of_unless_asked_for(plan):
    assert hosts(plan, {}).judge(verbose=False) == []
    (told,) = hosts(plan, {"name": "node-a", "sizes": {**SIZES, "/out/.mark": -1}}).judge(verbose=True)
    assert "shared" in told.splitlines()[-2] and "its own" in told.splitlines()[-1]
    assert [line.split()[0] for line in told.splitlines()] == ["the", "host", "10.0.0.1", "10.0.0.2"]


def test_what_hosts_differ_in_is_one_table(plan):
    versions = {**FACTS["versions"], "msrl-graph": "0.1.0 ffffffff", "torch": "", "numpy": "2.4.5"}
    sizes = {**SIZES, "/m/model.safetensors": -1, "/out/.mark": -1}
    assert refused(hosts(plan, {}, {"versions": versions, "sizes": sizes})) == [
        "host-differs: msrl-graph is not 0.1.0 0a1b2c3d on every host, as on the driver's host",
        "torch is not installed on every host",
        "model policy differs from this machine's, or is missing, on a host that reads it",
        "  host                                  msrl-graph        torch       model policy",
        "  10.0.0.1 (node-a), 10.0.0.2 (node-b)  0.1.0 0a1b2c3d    2.13.0+cpu  present",
        "  10.0.0.3 (node-c)                     0.1.0 ffffffff !  - !         1 of 2 files !",
        "= install the same versions on every host, from the same constraints",
        "the same files belong at the same path on every host: in a folder that they share, or a copy on each",
    ]


def test_files_of_the_same_size_that_hold_something_else_are_told(plan):
    other = {**DIGESTS, "/m/model.safetensors": "of another model"}
    larger = {**SIZES, "/m/model.safetensors": 5001}
    assert refused(hosts(plan, {"digests": other}, {"digests": other, "sizes": larger})) == [
        "host-differs: model policy differs from this machine's, or is missing, on a host that reads it",
        "  host               model policy",
        "  10.0.0.1 (node-a)  present",
        "  10.0.0.2 (node-b)  other contents !",
        "  10.0.0.3 (node-c)  other sizes !",
        "= the same files belong at the same path on every host: in a folder that they share, or a copy on each",
    ]


def test_what_is_harmless_is_a_warning_and_hosts_that_are_alike_are_one_line(plan):
    patch = {"versions": {**FACTS["versions"], "Python": "3.11.9"}, "name": "same"}
    told = hosts(plan, patch, patch, patch, patch, clocks=[0, 4, 4, 4, 4]).judge(verbose=False)
    assert told == [
        "\n".join(
            [
                "warning[host-differs]: Python is not 3.11.7 on every host, as on the driver's host",
                "clocks differ, and the trace aligns the events of hosts by them",
                "  host                                     Python    clock",
                "  10.0.0.1 (node-a)                        3.11.7    the same",
                "  10.0.0.2, 10.0.0.3, 10.0.0.4 and 1 more  3.11.9 !  +4.0 s !",
                "  install the same versions on every host, from the same constraints",
                "synchronize the hosts' clocks with NTP",
            ]
        )
    ]


def test_a_host_that_never_has_the_memory_is_no_resource_and_a_full_one_a_warning(plan):
    needs = max(m.total for m in plan.memory if m.place == "host")
    (warned,) = hosts(plan, {"memory": needs - 1}).judge(verbose=False)
    assert warned.startswith("warning[no-resources]: the plan needs up to ")
    told = refused(hosts(plan, {"memory": 0, "total": needs - 1}))
    assert told[0].startswith("no-resources: the plan needs up to ") and told[-2].endswith(" !")


def test_an_interface_that_a_program_states_belongs_on_every_host(plan):
    stated = replace(plan, cluster=replace(plan.cluster, interface="eth1"))
    assert refused(hosts(stated, {"interface": "", "speaks": ""}))[:3] == [
        "host-differs: not every host has the interface eth1 with an address",
        "  host               interface",
        "  10.0.0.1 (node-a)  eth0 10.0.0.1",
    ]


@pytest.fixture(scope="module")
def on_ascend():
    program = """import grpo
cluster pod { device = "ascend-910c-die", nodes = 2, devices_per_node = 8 }
deploy grpo on pod {
  model policy = "tiny"
  data source = "rows.jsonl" { prompt = "p" }
}
"""
    with warnings.catch_warnings(action="ignore"):
        found = compile("p.rlg", text=program)
    own = Setting("TASK_QUEUE_ENABLE", "1", "no graph is captured with level 2", "a page", fails="2")
    return replace(found, surroundings=(ProcessEnvironment(found.pools[0].name, (own,)),))


def test_an_interpreter_of_a_pool_is_told_on_the_hosts_that_have_processes_of_it():
    program = """import grpo
cluster pod { device = "cpu", nodes = 3 }
deploy grpo on pod {
  model policy = "tiny"
  data source = "rows.jsonl" { prompt = "p" }
  place actor.generate on nodes 1..2
  engine actor.generate = hf { python = "/opt/python" }
}
"""
    found = {"Python": "3.11.2", "msrl-graph": "0.1.0 0a1b2c3d", "torch": "2.10.0", "ray": "2.60.0"}
    own = {**FACTS, "versions": {**FACTS["versions"], "ray": "2.60.0"}}
    absent = {"/opt/python": host_facts.Versions(found={}, wrong="No such file or directory")}
    there = {"/opt/python": host_facts.Versions(found=found, wrong="")}

    def cluster(*others):
        each = [{**own, "others": seen, "name": f"node-{i}"} for i, seen in enumerate(others)]
        made = compile("p.rlg", text=program, sets=dict.fromkeys(("prompts", "group", "response_len"), "8"))
        return replace(hosts(made, {}, {}), seen=each, here=own)

    assert cluster(absent, there, there).judge(verbose=False) == []
    assert refused(cluster(absent, there, absent)) == [
        "host-differs: the interpreter /opt/python does not fit the run on every host",
        "  host               /opt/python",
        "  10.0.0.1 (node-0)  not used",
        "  10.0.0.2 (node-1)  present",
        "  10.0.0.3 (node-2)  does not run: No such file or directory !",
        f"= {interpreters.MEND}",
    ]


def test_a_mask_that_hides_devices_of_a_host_is_told_there(on_ascend):
    all_seen = {"devices": 8}
    masked = {"devices": 8, "variables": {"ASCEND_RT_VISIBLE_DEVICES": "0,1,2,3,8,9,10,11"}}
    hosted = replace(hosts(on_ascend, masked), seen=[{**FACTS, **all_seen}, {**FACTS, **masked, "name": "node-b"}])
    assert refused(hosted) == [
        "no-resources: ASCEND_RT_VISIBLE_DEVICES=0,1,2,3,8,9,10,11: there is no 8, only 0 to 7; 4 of 8 ids are read",
        "  host               ASCEND_RT_VISIBLE_DEVICES",
        "  10.0.0.1 (node-a)  -",
        "  10.0.0.2 (node-b)  0,1,2,3,8,9,10,11 !",
        "= unset ASCEND_RT_VISIBLE_DEVICES where Ray is started, or list the host's own numbers, rising from 0",
    ]


def test_a_variable_that_a_host_has_set_otherwise_is_told_and_one_that_fails_refused(on_ascend):
    def with_level(*levels):
        levels = [{**FACTS, "devices": 8, "name": f"node-{i}", "variables": level} for i, level in enumerate(levels)]
        return replace(hosts(on_ascend, {}), seen=levels)

    assert with_level({}, {"TASK_QUEUE_ENABLE": "1"}).judge(verbose=False) == []
    told = ": the plan wants TASK_QUEUE_ENABLE=1: no graph is captured with level 2"
    (warned,) = with_level({}, {"TASK_QUEUE_ENABLE": "0"}).judge(verbose=False)
    assert warned.splitlines() == [
        f"warning[kept-variable]{told}",
        "  host               TASK_QUEUE_ENABLE",
        "  10.0.0.1 (node-0)  -",
        "  10.0.0.2 (node-1)  0 !",
        "  unset it, or leave it if it is intended",
    ]
    assert refused(with_level({"TASK_QUEUE_ENABLE": "0"}, {"TASK_QUEUE_ENABLE": "2"})) == [
        f"failing-variable{told}",
        "  host               TASK_QUEUE_ENABLE",
        "  10.0.0.1 (node-0)  0",
        "  10.0.0.2 (node-1)  2 !",
        "= unset TASK_QUEUE_ENABLE, or set it to 1 (a page)",
    ]


def test_a_host_that_has_nothing_but_python_says_what_it_is(tmp_path):
    """As Ray hands it over: by its code."""
    (tmp_path / "there").write_text("12345")
    asked = {
        "packages": {"numpy": ("numpy",), "vllm": ("vllm-of-nobody", "pytest")},
        "others": {"/nowhere/python": ["/nowhere/python"]},
        "files": [str(tmp_path / "there"), str(tmp_path / "none")],
        "devices": "",
        "variables": ["PATH", "SET_BY_NOBODY"],
        "address": "127.0.0.1",
        "interface": "",
    }
    found = host_facts.look(asked)
    assert found["sizes"] == {str(tmp_path / "there"): 5, str(tmp_path / "none"): -1}
    assert found["versions"]["numpy"] and found["versions"]["vllm"] == pytest.__version__
    assert [*found["variables"]] == ["PATH"]
    assert found["others"] == {"/nowhere/python": {"found": {}, "wrong": "No such file or directory"}}
    assert (found["interface"], found["speaks"]) == ("lo", "127.0.0.1")
    assert found["versions"]["msrl-graph"].count(" ") == 1 and 0 < found["memory"] <= found["total"]
    assert host_facts.find_interface("127.0.0.1", "eth-of-nobody") == ("", "")
    told = f"runpy.run_path({host_facts.__file__!r})['look']({asked!r})['versions']['msrl-graph']"
    bare = f"import runpy; print({told} or 'none')"
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path.append({_psutil()!r}); {bare}"],
        capture_output=True, text=True, check=False, cwd=tmp_path, env={"PATH": os.environ["PATH"]},
    )  # fmt: skip
    assert done.stdout == "none\n", done.stderr


def _psutil():
    import ray

    return str(Path(ray.__file__).parent / "thirdparty_files")


MINE = """
    from helper import half
    import pack.inner

    def score(response: str, answer: str) -> float:
        import late
        return half(len(response)) + pack.inner.ONE + late.ZERO
"""
BESIDE = {
    "mine.py": MINE,
    "helper.py": "import json\n\n\ndef half(n):\n    return 1 / n\n",
    "late.py": "import mine\n\nZERO = 0\n",
    "pack/__init__.py": "",
    "pack/inner.py": "from . import other\nONE = other.ONE\n",
    "pack/other.py": "ONE = 1\n",
    "unasked.py": "raise SystemExit\n",
}


def written(folder):
    for name, text in BESIDE.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(textwrap.dedent(text))
    return folder / "mine.py"


def test_what_a_python_file_imports_from_its_folder_goes_with_it(tmp_path):
    path = written(tmp_path)
    assert {p.relative_to(tmp_path).as_posix() for p in user_modules.modules(path)} == BESIDE.keys() - {"unasked.py"}


def test_what_is_shipped_is_loaded_from_there_and_tracebacks_name_the_users_own_file(tmp_path):
    """In a process that sees other files at these paths."""
    path = written(tmp_path / "user")
    files = {str(p): ShippedFile(p.read_bytes(), 0) for p in user_modules.modules(path)}
    for name in BESIDE:
        (tmp_path / "user" / name).write_text("raise RuntimeError('an old copy')\n")
    code = f"""
        import json, sys, traceback
        from pathlib import Path
        from msrl_graph.runtime.process import shipped_files
        from msrl_graph.runtime.process.shipped_files import ShippedFile
        folder = shipped_files.ship_files({files!r})
        shipped_files.use_folder(str(folder))
        module = shipped_files.import_file({str(path)!r})
        print(module.score("ab", ""), module.__file__, sys.modules["pack.inner"].__file__, folder)
        try:
            module.score("", "")
        except ZeroDivisionError as error:
            print("".join(traceback.format_exception(error)))
        assert not list(Path(folder).rglob("*.pyc"))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    first, trace = done.stdout.split("\n", 1)
    value, *where, folder = first.split()
    assert (value, where) == ("1.5", [str(path), str(path.parent / "pack" / "inner.py")])
    assert f'File "{path.parent / "helper.py"}", line 5, in half\n    return 1 / n' in trace and folder not in trace
    # It goes with the process, though nobody of the run is left to remove it.
    subprocess.run(
        ["sh", "-c", f"for i in 1 2 3 4 5 6 7 8 9; do test -e {folder} || exit 0; sleep 0.2; done; exit 1"], check=True
    )


def test_what_is_too_large_to_be_shipped_is_refused(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / "model" / name).write_bytes((EXAMPLE / "model" / name).read_bytes())
    (tmp_path / "model" / "notes.txt").write_bytes(b"x" * 3_000_000)
    plan = compile("grpo", model=str(tmp_path / "model"), sets={"prompt_len": "8", "response_len": "8"})
    shipped = shipping.files(plan)
    assert sorted(Path(p).name for p in shipped) == ["config.json", "notes.txt", "tokenizer.json"]
    monkeypatch.setattr(shipping, "MOST", 1 << 20)
    with pytest.raises(Fault) as caught:
        shipping.files(plan)
    (told,) = caught.value.diagnostics
    total = sum(len(f.content) for f in shipped.values()) / 1e6
    assert told.message == (
        f"{total:.3g} MB would be shipped to each host, more than 1.05 MB; the largest file is "
        f"{tmp_path / 'model' / 'notes.txt'}, of 3 MB, with {tmp_path / 'model'}"
    )
