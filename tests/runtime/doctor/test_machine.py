"""msrl-doctor: how machines are read, what is shown, whether a program fits; and on real hosts."""

import ast
import json
import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from folders import ROOT
from hosts import Hosts, possible
from hypothesis import given
from hypothesis import strategies as st
from machines import CANN, DRIVER, INFO, a2, a3_dies, cpu, gpu, h100, installed, meminfo, npu_smi, topology
from place import EXAMPLE
from sample import examples

from msrl_graph import compile
from msrl_graph.backends.packages import list_version_pairs
from msrl_graph.cli import doctor
from msrl_graph.hardware import version_pairs
from msrl_graph.runtime.doctor import hosts, machine, output_parsers, program, report
from msrl_graph.runtime.doctor.examine import judge, question
from msrl_graph.runtime.doctor.findings import Finding, asking
from msrl_graph.runtime.doctor.machine import Machine, look

ROOM = Path(machine.__file__).parent


def run(*words, each="", where="", seconds=20.0):
    return {"words": list(words), "each": each, "where": where, "seconds": seconds}


def test_what_a_machine_is_asked(tmp_path):
    for i in (0, 3, 11):
        (tmp_path / f"dev{i}").write_text(f"text {i}")
    (tmp_path / "tool").write_text("#!/bin/sh\necho port $1\nexit $1\n")
    (tmp_path / "tool").chmod(stat.S_IRWXU)
    os.environ["MSRL_TESTED"] = str(tmp_path)
    try:
        asked = asking(
            texts=["$MSRL_TESTED/dev?", "$MSRL_NOT_SET/dev?"],
            paths=[f"{tmp_path}/dev*"],
            sizes=[str(tmp_path / "dev11"), str(tmp_path / "none")],
            marks=[str(tmp_path), str(tmp_path / "none")],
            variables=["MSRL_TEST*"],
            packages={"pytest": ["nobodys-name", "pytest"], "none": ["nobodys-name"]},
            sources=["rich/py.typed", "nobodys/file", "json/decoder.py"],
            commands=[
                run("tool", "{}", each=f"{tmp_path}/dev*", where=f"{tmp_path}/dev*"),
                run("nobodys-tool"),
                run("tool", "7", where=f"{tmp_path}/no*"),
            ],
            folders=[str(tmp_path)],
            rooms=["/dev/shm", str(tmp_path / "none")],
        )
        seen = look(Machine(), asked)
    finally:
        del os.environ["MSRL_TESTED"]
    assert seen["texts"].keys() == {str(tmp_path / "dev0"), str(tmp_path / "dev3"), "json/decoder.py"}
    assert seen["paths"] == [str(tmp_path / f"dev{i}") for i in (0, 11, 3)]
    assert [*seen["sizes"].values()] == [7, -1] and [bool(m) for m in seen["marks"].values()] == [True, False]
    assert seen["variables"] == {"MSRL_TESTED": str(tmp_path)} and seen["packages"] == {"pytest": pytest.__version__}
    assert seen["said"] == {
        **{f"tool {n}": {"status": n, "text": f"port {n}\n"} for n in (0, 3, 11)},
        "nobodys-tool": {"status": "absent", "text": ""},
    }
    assert seen["rooms"][str(tmp_path / "none")] == (0, 0) and json.loads(json.dumps(seen))["name"] == seen["name"]


def test_commands_that_hang_are_left_together():
    """With the children that they have started, and though they do not heed being asked to end."""
    begin = time.monotonic()
    deaf = "trap '' TERM; sleep 60 & wait; sleep 60"
    asked = asking(commands=[run("sh", "-c", f"{deaf} # {i}", seconds=0.5) for i in range(8)])
    seen = look(Machine(), asked)
    assert {said["status"] for said in seen["said"].values()} == {"hung"} and len(seen["said"]) == 8
    assert time.monotonic() - begin < 10


def test_reading_needs_neither_another_package_nor_knows_a_kind_of_device():
    """Ray hands hosts the code of this file alone."""
    tree = ast.parse((ROOM / "machine.py").read_text())
    names = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)} | {
        a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names
    }
    assert {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) == {"process"}
    loaded = "import sys; from msrl_graph.cli import doctor; code = doctor.main(['--json']); "
    loaded += "print({'torch', 'ray', 'transformers', 'numpy', 'psutil'} & {*sys.modules}, code, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr == "set() 0\n" and json.loads(done.stdout)["status"] == 0


def test_forms_that_are_not_known_give_nothing():
    memory = "0000:C0:00.0  | 0    0 / 0    2886 / 65536 |\n"
    no_health = f"| 1     Ascend910\n| 0     0 | {memory}"
    no_chip = f"| 1     Ascend910 | OK | 97.5 |\n|  | {memory}"
    tables = ("|||\n||", "+---+\n| a | b | c | d |\n" * 3, "\x00,,,,,,,", no_health, no_chip)
    for text in ("", "\n\n", "no such table", *tables):
        assert output_parsers.npu_dies(text) == output_parsers.gpus(text, text) == output_parsers.xids(text) == []
        assert output_parsers.npu_link(text) == output_parsers.cann(text) == output_parsers.torch_cuda(text) == ""
        assert (
            output_parsers.links(text) == {}
            and output_parsers.memory(text, text, text) == (0, 0)
            and not output_parsers.cards(text)
        )


KNOWN = [
    npu_smi(a3_dies()[:4], held=[(0, 0, 4711, "python", 512)]),
    topology(2),
    meminfo(),
    "GPU-0, 4711, a, b, 812\n" + gpu(0),
    "0008\t8086a7a0\t0\n0010\t10de2330\t10\n",
]


@given(
    st.sampled_from(KNOWN), st.randoms(use_true_random=False), st.text("0123456789abxz,|:/.- \t\n=\u00b2", max_size=6)
)
@examples(200)
def test_damaged_output_raises_nothing(text, random, piece):
    begin, end = sorted(random.randrange(len(text)) for _ in range(2))
    for damaged in (text[:begin] + piece + text[end:], text.replace(random.choice(text), piece)):
        for parse in (
            "npu_dies",
            "npu_driver",
            "npu_link",
            "cann",
            "gpu_fields",
            "links",
            "xids",
            "torch_cuda",
            "cards",
        ):
            getattr(output_parsers, parse)(damaged)
        output_parsers.gpus(damaged, damaged)
        output_parsers.memory(damaged, piece, piece)


def test_the_name_of_a_process_may_have_commas():
    row = gpu(0).split(", ")
    (device,) = output_parsers.gpus(gpu(0), f"{row[1]}, 4711, /bin/a,b, 812 MiB\n{row[1]}, 4712, c, 7\n")
    assert [(h.pid, h.name, h.bytes) for h in device.holders] == [("4711", "a,b", 0), ("4712", "c", 7 << 20)]


def test_versions_that_go_together():
    assert (
        version_pairs.numbers("2.10.0.post4")
        == version_pairs.numbers("2.10.0+cpu")
        == version_pairs.numbers("2.10.0rc1")
        == (2, 10, 0)
    )
    assert version_pairs.numbers("26.0.rc1") == (26, 0) and version_pairs.numbers("core") == ()

    def broken(**versions):
        found = version_pairs.find_broken_pairs(versions, list_version_pairs())
        return [(pair.package, pair.other) for pair in found]

    found = broken(**{"vllm-ascend": "0.23.0", "torch": "2.13.0", "torch-npu": "2.10.0.post4", "CANN": "9.1.0"})
    assert found == [("vllm-ascend", "torch")]
    # What vllm-ascend has changed is not held against the plug-in too.
    found = broken(**{"torch-npu": "2.10.0", "torch": "2.9.0", "vllm-ascend": "0.23.0"})
    assert found == [("vllm-ascend", "torch")]
    for cann, driver, holds in (("9.1.0", "25.2.1", True), ("9.1.0", "25.0.rc1", False), ("9.0.0", "25.0.rc1", True)):
        assert (broken(**{version_pairs.CANN: cann, version_pairs.CANN_DRIVER: driver}) == []) == holds
    pinned = (ROOT / "constraints" / "ascend.txt").read_text().splitlines()
    assert broken(**dict(line.split("==") for line in pinned if "==" in line)) == []
    pairs = (*version_pairs.DRIVER_PAIRS, *list_version_pairs(), *version_pairs.TORCH_PAIRS)
    assert all(pair.source and pair.same + bool(pair.exact) + bool(pair.least) for pair in pairs)


def test_the_table_at_80_columns(golden):
    found = a2(
        files={DRIVER: "Version=24.1.rc2\n"} | installed(CANN, "9.1.0", "9.0.0"),
        environment={"ASCEND_RT_VISIBLE_DEVICES": "0,1, 2,3"},
        descriptors=(1024, 1048576),
    ).host()
    golden("doctor.table.txt", report.table(judge([found]), [found.title], 80))


def test_many_hosts_are_named_in_short():
    names = [f"10.0.0.{i}" for i in range(9)]
    finding = Finding("mask", "is empty", "wrong", "unset it", tuple(names[2:8]))
    first, step, _, end = report.table([finding], names, 100).splitlines()
    assert first == "wrong    mask  10.0.0.2, 10.0.0.3, 10.0.0.4 and 3 more: is empty"
    assert step == "             > unset it"
    assert end == "9 hosts: 1 wrong, 0 to look at; begin with the first that is wrong"
    coloured = report.table([finding], names, 100, colour=True)
    assert coloured.startswith("\x1b[1;31mwrong  \x1b[0m  mask") and coloured.count("\x1b") == 2


def test_the_json_has_what_the_table_has():
    found = judge([cpu(rooms={}).host()])
    told = json.loads(report.document(found, ["node-a"]))
    assert told.keys() == {"version", "status", "hosts", "findings"} and told["status"] == 0
    (warned,) = [f for f in told["findings"] if f["state"] != "ok"]
    assert warned == {
        "check": "shm",
        "told": "there is no /dev/shm: rows use temporary files",
        "state": "warning",
        "next": "sudo mount -t tmpfs tmpfs /dev/shm",
        "hosts": ["node-a"],
    }


def test_the_page_has_all_checks():
    page = (ROOT / "docs" / "guides" / "setup.md").read_text()
    page = page.partition("## The checks")[2].partition("\n## ")[0]
    checks = {"speed"}
    for path in ROOM.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Finding":
                checks.add(ast.literal_eval(node.args[0]))
    rows = {line.split("|")[1].strip(" `") for line in page.splitlines() if line.startswith("| `")}
    assert checks == rows & checks and rows == checks


PROGRAM = EXAMPLE / "grpo.rlg"


@pytest.fixture(scope="module")
def plan():
    return compile(str(PROGRAM))


def fits(plan, *found):
    return [
        (f.state, f.check, f.told, f.next)
        for f in judge(found, plan)
        if f.check.startswith(("plan-", "program")) and f.state != "ok"
    ]


def having(plan, *, lacks=(), **changed):
    sizes = {path: -1 if path in lacks else 10 for path in program.wants(plan)["sizes"]}
    return cpu(**changed, sizes=sizes)


def test_a_program_that_fits_is_told_so(plan):
    found = [f for f in judge([having(plan).host(plan)], plan) if f.check == "program"]
    assert found == [Finding("program", "arithmetic can run here: 1 host of 2 CPU")]


def test_what_a_machine_lacks_of_a_program(plan):
    data = str(EXAMPLE / "train.jsonl")
    weights = str(EXAMPLE / "model" / "model.safetensors")
    lacking = having(
        plan, lacks={data, weights}, packages={"torch": None}, rooms={"/dev/shm": (1 << 20, 1 << 26)}, cores=0
    )
    found = fits(plan, lacking.host(plan))
    assert [f for f in found if f[1] == "plan-engines"] == [
        ("wrong", "plan-engines", f"the engine {name} of the program needs torch", "pip install torch")
        for name in ("hf", "fsdp")
    ]
    assert [f for f in found if f[1] != "plan-engines"] == [
        (
            "wrong",
            "plan-devices",
            "the plan asks for 1 host of 2 CPU; this machine has 0",
            "lower `nodes` or `devices_per_node`, or set RAY_ADDRESS to a cluster that has them",
        ),
        (
            "warning",
            "plan-memory",
            "a host's rows take 67.1 MB, but /dev/shm has 1.05 MB free",
            "sudo mount -o remount,size=16G /dev/shm",
        ),
        ("wrong", "plan-files", f"model policy is missing: {weights}", "put it there"),
        ("wrong", "plan-files", f"data source is missing: {data}", "put it there"),
    ]


def test_memory_that_a_plan_needs_and_a_host_has_not(plan):
    needs = max(m.total for m in plan.memory if m.place == "host")
    for free, total, state in ((needs - 4096, 2 * needs, "warning"), (needs // 4, needs // 2, "wrong")):
        files = {"/proc/meminfo": f"MemTotal: {total >> 10} kB\nMemAvailable: {free >> 10} kB\n"}
        assert [f[:2] for f in fits(plan, having(plan, files=files).host(plan))] == [(state, "plan-memory")]


def test_a_cluster_that_lacks_something_of_a_program(plan):
    data = str(EXAMPLE / "train.jsonl")
    found = [
        having(plan, lacks=lacks).host(plan, address=f"10.0.0.{i}", resources={"CPU": 1}, others=1)
        for i, lacks in enumerate(((), {data}))
    ]
    assert [f[:3] for f in fits(plan, *found)] == [
        ("wrong", "plan-devices", "the plan asks for 1 host of 2 CPU; 0 of 2 have that, and the most is 1"),
        ("warning", "plan-files", f"data source is missing: {data}"),
    ]


PLANNED = """
    import grpo
    cluster box {{ device = "{device}", devices_per_node = 8 }}
    deploy grpo on box {{
      model policy = "qwen2.5-7b"
      data source = "rows.jsonl" {{ prompt = "q", answer = "a" }}
    }}
"""


@pytest.mark.parametrize(("device", "made"), [("h100", h100), ("ascend-910b", a2)])
def test_memory_of_devices_that_others_hold(device, made, tmp_path):
    (tmp_path / "p.rlg").write_text(PLANNED.format(device=device))
    planned = compile(str(tmp_path / "p.rlg"))
    needs = max(m.total for m in planned.memory if m.place == "device")
    whole = made().host(planned)
    assert not [f for f in fits(planned, whole) if f[1] in ("plan-memory", "plan-devices", "plan-engines")]
    if made is a2:
        dies = [(0, 0, "", "910B3", "OK", 65536 - (needs >> 20) + 1000, 65536)]
        held = made(said={INFO: npu_smi(dies)}).host(planned)
        (line,) = [f for f in fits(planned, held) if f[1] == "plan-memory"]
        assert line[0] == "wrong" and " of a device: " in line[2] and line[2].endswith(" are free on NPU 0")
    assert ("wrong", "plan-files") in [f[:2] for f in fits(planned, whole)]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--calibrate", "--json"], "leave out `--json`"),
        (["--set", "a=1"], "go with `--program`"),
        (["--program", "grpo", "--set", "a"], "`--set` takes PARAM=VALUE"),
        (["--program", "plan.json", "--deploy", "a"], "a plan is compiled already"),
        (["--out", "x"], "goes with `--calibrate`"),
    ],
)
def test_bad_usage(arguments, told, capsys):
    with pytest.raises(SystemExit) as ended:
        doctor.main(arguments)
    assert ended.value.code == 2 and told in capsys.readouterr().err


def test_a_program_of_this_machine(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert doctor.main(["--program", str(PROGRAM)]) == 0
    assert "arithmetic can run here: 1 host of 2 CPU" in capsys.readouterr().out
    assert doctor.main(["--program", str(PROGRAM), "--set", "nobodys=1"]) == 1
    assert "nobodys" in capsys.readouterr().err
    (tmp_path / "p.rlg").write_text(PLANNED.format(device="ascend-910b"))
    assert doctor.main(["--program", str(tmp_path / "p.rlg"), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert ("plan-devices", "wrong") in {(f["check"], f["state"]) for f in told["findings"]}


def test_a_cluster_that_is_not_there(monkeypatch, capsys):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert doctor.main([]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert out.startswith("wrong ray no Ray cluster at 127.0.0.1:1 (RAY_ADDRESS): connection refused > start one")
    assert "ok python" in out and "RAY_ADDRESS is not set" not in out


def test_a_cluster_that_does_not_tell_in_time(monkeypatch):
    monkeypatch.setattr(hosts, "WITHIN", 0.01)
    begin = time.monotonic()
    assert hosts.joined("127.0.0.1:1", question(None)) == (
        [],
        [Finding("ray", "the Ray cluster at 127.0.0.1:1 does not report its hosts in time", "wrong", hosts.STATUS)],
    )
    assert time.monotonic() - begin < 10


@pytest.mark.slow
@pytest.mark.skipif(not possible(), reason="no hosts can be made here: needs root and iproute2")
def test_the_hosts_of_a_real_cluster(tmp_path):
    """Whose second host has neither the model nor this package."""
    shutil.copytree(EXAMPLE / "model", tmp_path / "model")
    for name in ("train.jsonl", "test.jsonl"):
        (tmp_path / name).write_bytes((EXAMPLE / name).read_bytes())
    (tmp_path / "p.rlg").write_text(PROGRAM.read_text())
    os.environ["RAY_EXPERIMENTAL_NOSET_TESTED"] = "1"
    try:
        made = Hosts(2, hidden=[tmp_path, ROOM.parents[1]], cpus=(2, 2))
    finally:
        del os.environ["RAY_EXPERIMENTAL_NOSET_TESTED"]
    try:
        environment = {**os.environ, **made.environment, "RAY_ADDRESS": made.address}

        def asked(code, *arguments):
            words = [*made.on(0, tmp_path), sys.executable, "-c", code, *arguments]
            return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=90, check=False)

        main = "import sys; from msrl_graph.cli.doctor import main; sys.exit(main())"
        begin = time.monotonic()
        done = asked(main, "--json", "--program", "p.rlg")
        assert time.monotonic() - begin < 60
        told = json.loads(done.stdout)
        both = [made.ip(0), made.ip(1)]
        said = {f["check"]: f for f in told["findings"]}
        assert told["hosts"] == both and done.returncode == 1, done.stderr
        assert said["ray"]["told"] == "2 hosts, 4 CPU" and said["ray"]["hosts"] == both
        assert said["folder"]["told"].startswith(f"{tmp_path} is not shared")
        assert said["clock"]["state"] == "ok"
        lacking = {
            (f["state"], f["told"].partition(" is ")[0], *f["hosts"]) for f in told["findings"] if f["state"] != "ok"
        }
        other = made.ip(1)
        assert lacking == {
            ("wrong", "msrl-graph", other),
            ("wrong", "model policy", other),
            ("warning", "data source", other),
            ("warning", "data held_out", other),
        }
        code = """if 1:
            from msrl_graph.runtime.doctor import hosts
            from msrl_graph.runtime.doctor.findings import asking
            found, _ = hosts.joined(ADDRESS, asking(variables=["RAY_EXPERIMENTAL_NOSET_TESTED"]))
            print([h.variables for h in found])
        """
        done = asked(code.replace("ADDRESS", repr(made.address)))
        assert done.stdout == f"{[{'RAY_EXPERIMENTAL_NOSET_TESTED': '1'}] * 2}\n", done.stderr
    finally:
        made.close()
