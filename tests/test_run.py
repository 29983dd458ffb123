"""The main job, run for real: two layouts give the same numbers, every refusal comes before anything is started, nothing is left."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "arithmetic"
PROGRAM = (EXAMPLE / "grpo.rlg").read_text()
SMALL = ["--set", "prompts=8", "--set", "group=4"]


class Place:
    """A folder with the example in it, and a temporary folder of its own, to see what is left behind."""

    def __init__(self, folder):
        self.folder = folder
        for item in ("train.jsonl", "test.jsonl", "model"):
            (folder / item).symlink_to(EXAMPLE / item)
        self.temporary = Path(tempfile.mkdtemp(prefix="m", dir="/tmp"))  # short: Ray's sockets lie below it

    def write(self, *changes):
        text = PROGRAM
        for old, new in changes:
            assert old in text, old
            text = text.replace(old, new)
        (self.folder / "p.rlg").write_text(text)
        return text

    def start(self, *arguments, **environment):
        command = [sys.executable, "-c", "import sys; from msrl_graph.cli import run_main; sys.exit(run_main())", *arguments]
        variables = {**os.environ, "TMPDIR": str(self.temporary), **environment}
        variables.pop("MSRL_DEBUG", None)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        # Whoever started the tests in the background may have had SIGINT ignored, which children inherit.
        heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        return subprocess.Popen(command, cwd=self.folder, env=variables, preexec_fn=heed, **pipes)

    def run(self, *arguments, **environment):
        process = self.start(*arguments, **environment)
        out, err = process.communicate(timeout=200)
        return process.returncode, out, err

    def wait_for_lines(self, out, count):
        """Until the run has written so many lines of metrics."""
        log = self.folder / out / "metrics.jsonl"
        until = time.monotonic() + 120
        while not (log.exists() and log.read_text().count("\n") >= count):
            assert time.monotonic() < until, f"{out} has not written {count} lines"
            time.sleep(0.2)

    def processes(self):
        """The processes that were started with this temporary folder, and have not ended."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                variables = (entry / "environ").read_bytes().split(b"\0") if entry.name.isdigit() else []
                ours = any(v.startswith(f"TMPDIR={self.temporary}".encode()) for v in variables)
                if ours and (entry / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    def assert_clean(self, within=10.0):
        until = time.monotonic() + within
        while (left := self.processes()) and time.monotonic() < until:
            time.sleep(0.2)
        assert not left, [Path(f"/proc/{p}/cmdline").read_bytes() for p in left]
        assert not list(self.temporary.iterdir())


@pytest.fixture
def place(tmp_path):
    place = Place(tmp_path)
    yield place
    for pid in place.processes():
        os.kill(pid, signal.SIGKILL)
    shutil.rmtree(place.temporary, ignore_errors=True)


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


ONE_RANK = [
    ("devices_per_node = 2", "devices_per_node = 1"),
    ("layout actor.update   { dp = 2, zero = 3 }", "layout actor.update   { dp = 1 }"),
    ("layout actor.generate { tp = 2 }", "layout actor.generate { dp = 1 }"),
]


@pytest.mark.slow
def test_two_layouts_train_alike_and_leave_what_they_promise(place):
    from safetensors.numpy import load_file

    lines, weights = {}, {}
    for name, changes in (("two", []), ("one", ONE_RANK)):
        place.write(*changes, ("samples = 1, temperature", "samples = 2, temperature"))
        code, out, err = place.run("p.rlg", *SMALL, "--iterations", "2", "--out", name, "--measure-memory")
        assert code == 0, err
        assert out.splitlines()[0] == f"results in {name}"
        assert out.splitlines()[-1].startswith("held-out accuracy 0.") and " -> 0." in out.splitlines()[-1]
        assert "predicted against measured" in err
        place.assert_clean()
        folder = place.folder / name
        lines[name] = metrics(folder)
        weights[name] = load_file(folder / "weights" / "actor" / "model.safetensors")
        assert {"curve.png", "trace.json", "plan.json", "memory.json", "tensorboard"} <= {p.name for p in folder.iterdir()}
        events = json.loads((folder / "trace.json").read_text())["traceEvents"]
        assert {"actor.generate", "actor.update", "reshard", "host.reward"} <= {e["name"] for e in events}
        assert all(e["ts"] >= 0 and e["dur"] >= 0 for e in events if e["ph"] == "X")
    assert [("evaluation" in x) for x in lines["two"]] == [True, False, False, True]
    for a, b in zip(lines["one"], lines["two"], strict=True):
        for key in ("reward", "loss", "grad_norm", "response_tokens", "loss/kl"):
            if key in a:
                assert b[key] == pytest.approx(a[key], rel=1e-4, abs=1e-7), key
    start = load_file(EXAMPLE / "model" / "model.safetensors")
    for tensor, value in weights["one"].items():
        assert abs(value - weights["two"][tensor]).max() < 1e-5
    assert max(abs(v - start[t]).max() for t, v in weights["one"].items()) > 1e-5
    # What each rank's tensors took, against the plan: the swap left the device, and came back.
    plan = json.loads((place.folder / "two" / "plan.json").read_text())
    released = plan["reshards"][0]["released_bytes_per_device"]
    for held in json.loads((place.folder / "two" / "memory.json").read_text()).values():
        assert held["before RELEASE actor.generate, host"] == released
        assert held["before RUN actor.infer, host"] == 0
        before, generating = held["before RESHARD actor.update, device"], held["before RELEASE actor.generate, device"]
        assert abs(generating - before) < 20_000  # generation weights in, update weights out: of the same size here


TWO_POOLS = [
    ("layout actor.update   { dp = 2, zero = 3 }", "apart actor.generate, actor.update"),
    ("layout actor.generate { tp = 2 }", "actor.generate -> reference.infer { stream = 8 }"),
]


@pytest.mark.slow
def test_generation_on_devices_of_its_own_trains_alike(place):
    from safetensors.numpy import load_file

    lines, weights = {}, {}
    for name, changes in (("one", ONE_RANK), ("apart", TWO_POOLS)):
        place.write(*changes, ("samples = 1, temperature", "samples = 2, temperature"))
        code, _, err = place.run("p.rlg", *SMALL, "--iterations", "2", "--out", name, "--measure-memory")
        assert code == 0, err
        place.assert_clean()
        lines[name] = metrics(place.folder / name)
        weights[name] = load_file(place.folder / name / "weights" / "actor" / "model.safetensors")
    for a, b in zip(lines["one"], lines["apart"], strict=True):
        for key in ("reward", "loss", "grad_norm", "response_tokens", "loss/kl"):
            if key in a:
                assert b[key] == pytest.approx(a[key], rel=1e-4, abs=1e-7), key
    assert all(abs(value - weights["apart"][tensor]).max() < 1e-5 for tensor, value in weights["one"].items())
    plan = json.loads((place.folder / "apart" / "plan.json").read_text())
    (edge,) = plan["reshards"]
    assert (edge["mode"], edge["released_bytes_per_device"]) == ("send", 0)
    assert all(x["reshard_bytes"] == edge["generate_bytes_per_device"] for x in lines["apart"] if "iteration" in x)
    # The generation's device holds its weights and nothing of the update's, the update's never lets go of its own.
    generating, updating = (json.loads((place.folder / "apart" / "memory.json").read_text())[f"rank {r}"] for r in range(2))
    assert abs(generating["before RELEASE actor.generate, device"] - edge["generate_bytes_per_device"]) < 20_000
    assert generating["before RELEASE actor.generate, host"] == updating["before RUN actor.infer, host"] == 0
    assert generating["after, device"] < 20_000 < edge["update_bytes_per_device"] < updating["before RUN reference.infer, device"]


# The second half of a program in other words: none of it may change a result.
HOW = {
    "central": "dock { mode = central }\n  reshard { mode = naive }\n  actor.generate -> actor.infer { stream = 8 }",
    "staged": "reshard { order = staged, bucket = 100 KB }\n  engine actor.update = fsdp { micro_batch = 3 }\n"
    "  engine actor.generate = hf { micro_batch = 3 }\n  host.advantage -> actor.update { balance = tokens }\n"
    "  actor.generate -> host.reward { stream = 5 }\n  source -> actor.generate { stream = 3 }",
}


@pytest.mark.slow
def test_how_it_runs_never_changes_the_result(place):
    found = {}
    for name, how in {"plain": "", **HOW}.items():
        place.write(
            ("mini_batch = 256", "mini_batch = 10, epochs = 2"),
            ("run { iterations", how + "\n  run { iterations"),
        )
        text = (place.folder / "p.rlg").read_text()
        (place.folder / "p.rlg").write_text("\n".join(line for line in text.split("\n") if "evaluate" not in line))
        code, _, err = place.run("p.rlg", *SMALL, "--iterations", "2", "--out", name)
        assert code == 0, err
        found[name] = metrics(place.folder / name)
    for name in HOW:
        for a, b in zip(found["plain"], found[name], strict=True):
            for key in ("reward", "loss", "grad_norm", "response_tokens", "loss/kl", "updates"):
                if key in a:
                    assert b[key] == pytest.approx(a[key], rel=2e-4, abs=1e-7), (name, key)
    assert found["plain"][0]["updates"] == 8  # 32 rows in mini-batches of 10, twice
    place.assert_clean()


@pytest.mark.slow
def test_a_plan_and_its_script_run(place):
    place.write(("every = 40", "every = 1"))
    from msrl_graph.cli import compile_main

    here = Path.cwd()
    os.chdir(place.folder)
    try:
        assert compile_main(["p.rlg", "--set", "prompts=4", "--set", "group=2", "--format", "json", "-o", "plan.json"]) == 0
        assert compile_main(["p.rlg", "--set", "prompts=4", "--set", "group=2", "--emit", "ray", "-o", "script.py"]) == 0
    finally:
        os.chdir(here)
    code, out, err = place.run("plan.json", "--iterations", "1", "--out", "a")
    assert code == 0, err
    assert [x.get("evaluation") for x in metrics(place.folder / "a")] == ["held_out", None, "held_out"]
    place.assert_clean()
    # The script holds all iterations of the program: one is enough here.
    script = place.folder / "script.py"
    script.write_text(re.sub(r'"iterations":\s*\d+', '"iterations": 1', script.read_text()))
    command = [sys.executable, "script.py", "--out", "b"]
    variables = {**os.environ, "TMPDIR": str(place.temporary)}
    done = subprocess.run(command, cwd=place.folder, env=variables, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == out.splitlines()[-1]  # the same plan, the same executor, the same figures
    place.assert_clean()


BAD = {
    "a misspelt column": (
        [("actor.infer(prompt, response) -> old_logp", "actor.infer(prompt, response) -> old_logb")],
        1,
        "error[unknown-column]",
        "-> old_logb",
    ),
    "a missing data file": (
        [('"train.jsonl"', '"trian.jsonl"')],
        1,
        "error[missing-file]: there is no data file trian.jsonl",
        "data source",
    ),
    "a layout that does not fit": ([("{ dp = 2, zero = 3 }", "{ tp = 4 }")], 1, "error[layout-size]", "layout actor.update"),
    "heads that cannot be divided": (
        [("devices_per_node = 2", "devices_per_node = 8"), ("{ tp = 2 }", "{ tp = 8 }"), ("{ dp = 2, zero = 3 }", "{ dp = 8 }")],
        1,
        "error[layout-divide]",
        "layout actor.generate",
    ),
    "an empty data file": ([('"train.jsonl"', '"empty.jsonl"')], 1, "error[no-data]: the data file empty.jsonl has no rows", "data source"),
    "a row without the field": (
        [('"train.jsonl"', '"short.jsonl"')],
        1,
        "error[bad-data]: line 2 of short.jsonl has no field `answer`",
        "data source",
    ),
    "a row that is not JSON": ([('"train.jsonl"', '"torn.jsonl"')], 1, "error[bad-data]: line 1 of torn.jsonl is not JSON", "data source"),
    "a preset without weights": ([('"./model"', '"tiny"')], 1, "error[unknown-model]", "model policy"),
    "devices that are not here": ([('device = "cpu"', 'device = "h100"')], 1, "error[not-yet]", "cluster laptop"),
    "more hosts than there are": (
        [("nodes = 1", "nodes = 2"), ("{ dp = 2, zero = 3 }", "{ dp = 4, zero = 3 }")],
        3,
        "error[no-resources]: the plan asks for 2 hosts of 2 CPU; this machine is 1 host of",
        "cluster laptop",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_told_at_its_line_before_anything_starts(place, case):
    changes, status, message, where = BAD[case]
    (place.folder / "empty.jsonl").write_text("\n\n")
    (place.folder / "short.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2="}\n')
    (place.folder / "torn.jsonl").write_text('{"prompt": "1+1=",\n')
    text = place.write(*changes)
    line = text[: text.index(where)].count("\n") + 1
    begin = time.monotonic()
    code, out, err = place.run("p.rlg", "--out", "results")
    assert (code, out) == (status, ""), err
    assert message in err and f"--> p.rlg:{line}:" in err, err
    assert "Traceback" not in err
    assert not (place.folder / "results").exists()
    assert time.monotonic() - begin < 60
    place.assert_clean(within=0.5)


@pytest.mark.slow
def test_a_ray_that_lacks_the_devices_is_refused_with_what_there_is(place):
    import ray
    from ray.cluster_utils import Cluster

    place.write()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        begin = time.monotonic()
        code, _, err = place.run("p.rlg", "--out", "results", RAY_ADDRESS=cluster.address)
        assert code == 3
        assert "error[no-resources]: the plan asks for 1 host of 2 CPU; Ray has 1 host, 1 CPU in all" in err
        assert time.monotonic() - begin < 60
        assert not (place.folder / "results").exists()
    finally:
        cluster.shutdown()
        ray.shutdown()


@pytest.mark.slow
def test_three_hosts_train_as_one(place):
    """Three raylets on this machine: a warehouse, a function host and a rank on each, controllers on the first."""
    import ray
    from ray.cluster_utils import Cluster

    place.write(*ONE_RANK, ("every = 40", "every = 1"))
    code, _, err = place.run("p.rlg", *SMALL, "--iterations", "2", "--out", "one")
    assert code == 0, err
    three = [("nodes = 1, devices_per_node = 2", "nodes = 3, devices_per_node = 1"), ("{ dp = 2, zero = 3 }", "{ dp = 3, zero = 3 }")]
    place.write(*three, ("{ tp = 2 }", "{ dp = 3 }"), ("mini_batch = 256", "mini_batch = 96"), ("every = 40", "every = 1"))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1)
        code, _, err = place.run("p.rlg", *SMALL, "--iterations", "2", "--out", "three", "--verbose", RAY_ADDRESS=cluster.address)
        assert code == 0, err
    finally:
        cluster.shutdown()
        ray.shutdown()
    for a, b in zip(metrics(place.folder / "one"), metrics(place.folder / "three"), strict=True):
        for key in ("reward", "loss", "grad_norm", "response_tokens", "loss/kl", "rows"):
            if key in a:
                assert b[key] == pytest.approx(a[key], rel=1e-4, abs=1e-7), key
    moved = metrics(place.folder / "three")[1]["dock_bytes"]
    assert moved["actor.update get away"] > 0
    logs = {p.name for p in (place.folder / "three" / "logs").iterdir()}
    assert {"rank-0.log", "rank-2.log", "functions-of-host-1.log", "driver.log"} <= logs
    place.assert_clean()


@pytest.mark.slow
def test_prompts_that_are_all_too_long_are_refused(place):
    place.write(("prompt    : i32[<= 6]", "prompt    : i32[<= 2]"))
    code, _, err = place.run("p.rlg", "--out", "results")
    assert code == 1
    assert "error[no-data]: no row of" in err and "train.jsonl is short enough to be used" in err and "data source" in err, err
    assert not (place.folder / "results").exists()
    place.assert_clean()


@pytest.mark.slow
def test_a_function_that_fails_is_named_with_its_line(place):
    (place.folder / "mine.py").write_text(
        "def score(response: str, answer: str) -> float:\n    return float(response == answer) / (len(answer) - 2)\n"
    )
    place.write(("call = exact_match()", 'call = "mine.py:score"'))
    code, _, err = place.run("p.rlg", *SMALL, "--out", "results")
    assert code == 3
    assert "error[run-failed]: `host.reward` (line 26) failed on row " in err and "ZeroDivisionError" in err and "mine.py:2" in err, err
    place.assert_clean()


@pytest.mark.slow
def test_a_wait_that_passes_its_deadline_says_who_waited_for_what(place):
    (place.folder / "mine.py").write_text(
        "import time\n\ndef score(response: str, answer: str) -> float:\n    time.sleep(60)\n    return 0.0\n"
    )
    place.write(
        ("call = exact_match()", 'call = "mine.py:score"'), ("run { iterations", "dock { deadline = 3 s }\n  run { iterations"), *ONE_RANK
    )
    text = (place.folder / "p.rlg").read_text()
    (place.folder / "p.rlg").write_text("\n".join(line for line in text.split("\n") if "evaluate" not in line))
    code, _, err = place.run("p.rlg", *SMALL, "--out", "results")
    assert code == 3
    head = "error[run-failed]: `actor.update` (group 0) has waited 3 s in train/0 for `advantage` from `host.advantage` (32 of 32 rows"
    assert head in err, err
    graph = "\n  functions of host 0 has been in host.reward in train/0 for 3 s\n  rank 0 has been in RUN actor.update in train/0"
    assert graph in err, err
    place.assert_clean()


@pytest.mark.slow
def test_a_deadline_is_told_by_the_dock_under_tensor_parallelism_too_and_work_that_never_ends_is_ended(place):
    (place.folder / "mine.py").write_text(
        "import time\n\ndef score(response: str, answer: str) -> float:\n    time.sleep(60)\n    return 0.0\n"
    )
    changes = [("call = exact_match()", 'call = "mine.py:score"'), ("run { iterations", "dock { deadline = 3 s }\n  run { iterations")]
    text = place.write(*changes, ("{ dp = 2, zero = 3 }", "{ tp = 2 }"))
    (place.folder / "p.rlg").write_text("\n".join(line for line in text.split("\n") if "evaluate" not in line))
    (stale := place.temporary / "msrl-run-x").mkdir()  # as a run leaves it of which all was killed: the next one removes it
    os.utime(stale, (0, 0))
    code, _, err = place.run("p.rlg", *SMALL, "--out", "a")
    assert code == 3 and "has waited 3 s in train/0 for `advantage` from `host.advantage`" in err, err
    assert not stale.exists()
    place.write(*changes)  # nobody waits for the reward of an evaluation
    begin = time.monotonic()
    code, _, err = place.run("p.rlg", *SMALL, "--out", "b")
    assert code == 3 and "for 3 s no row has moved; `host.reward` took rows last and has not come back" in err, err
    assert time.monotonic() - begin < 60
    place.assert_clean()


@pytest.mark.slow
@pytest.mark.parametrize("signal_", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_asked_to_end_leaves_nothing(place, signal_):
    place.write()
    process = place.start("p.rlg", *SMALL, "--out", "results")
    place.wait_for_lines("results", 3)
    process.send_signal(signal_)
    _, err = process.communicate(timeout=60)
    assert process.returncode == (130 if signal_ == signal.SIGINT else 143), err
    assert "Traceback" not in err
    place.assert_clean()


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_a_run_that_is_not_to_be_started_anew(place):
    place.write(("seed = 0 }", "seed = 0, restarts = 0 }"))
    process = place.start("p.rlg", *SMALL, "--out", "results")
    place.wait_for_lines("results", 4)
    ranks = [p for p in place.processes() if b"ray::Rank" in Path(f"/proc/{p}/cmdline").read_bytes()]
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    begin = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 3 and time.monotonic() - begin < 30
    assert "error[run-failed]: rank " in err and " died in " in err and " has waited " in err, err
    place.assert_clean()
