"""The main job, run for real: layouts give the same numbers, every refusal comes before anything is started, nothing is
left."""

import json
import os
import re
import signal
import site
import subprocess
import sys
import time
from pathlib import Path

import pytest
from place import EXAMPLE, MINE, ONE_RANK, SMALL, THRICE, TRAINED, assert_alike, metrics, weights

from msrl_graph.cli import compile_main
from msrl_graph.runtime.driver.run_folder import MADE


def held_in(folder):
    """By rank, what its tensors took before and after each instruction."""
    return json.loads((folder / "memory.json").read_text())


@pytest.mark.core
@pytest.mark.slow
def test_two_layouts_train_alike_and_leave_what_they_promise(place, reference):
    place.write(*TRAINED)
    code, out, err = place.run("p.rlg", *THRICE, "--out", "two", "--measure-memory")
    assert code == 0, err
    place.assert_clean()
    two = place.folder / "two"
    assert out.splitlines()[0] == "results in two"
    assert out.splitlines()[-1].startswith("held-out accuracy 0.") and " -> 0." in out.splitlines()[-1]
    assert "predicted against measured" in err
    assert [("evaluation" in x) for x in metrics(two)] == [True, False, True, False, True, False, True]
    assert metrics(two)[1]["updates"] == 6  # 32 rows in mini-batches of 12, twice
    assert_alike(reference, two)
    for folder in (reference, two):
        assert {"curve.png", "trace.json", "plan.json", "memory.json", "tensorboard"} <= {
            p.name for p in folder.iterdir()
        }
        events = json.loads((folder / "trace.json").read_text())["traceEvents"]
        assert {"actor.generate", "actor.update", "reshard", "host.reward"} <= {e["name"] for e in events}
        assert all(e["ts"] >= 0 and e["dur"] >= 0 for e in events if e["ph"] == "X")
        # Each delivery of weights is proven, and the run says how long that took.
        assert all(0 < x["phases"]["proof"] < x["seconds"] for x in metrics(folder) if "iteration" in x)
    assert {p.name for p in two.iterdir()} <= {*MADE}
    (place.folder / "new").touch()
    assert {p.stat().st_mode for p in two.rglob("*") if p.is_file()} == {
        (place.folder / "new").stat().st_mode
    }  # as the umask says
    from safetensors.numpy import load_file

    start = load_file(EXAMPLE / "model" / "model.safetensors")
    assert max(abs(v - start[t]).max() for t, v in weights(two).items()) > 1e-5
    # What each rank's tensors took, against the plan: the swap left the device, and came back.
    plan = json.loads((two / "plan.json").read_text())
    released = plan["reshards"][0]["released_bytes_per_device"]
    for held in held_in(two).values():
        assert held["before RELEASE actor.generate, host"] == released
        assert held["before RUN actor.infer, host"] == 0
        before = held["before RESHARD actor.update, device"]
        generating = held["before RELEASE actor.generate, device"]
        assert abs(generating - before) < 20_000  # generation weights in, update weights out: of the same size here


def another_environment(folder):
    """The interpreter of an environment beside this one, with the same packages; its processes tell who they are in
    `begun`."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True)
    (packages,) = (folder / "env" / "lib").glob("python*/site-packages")
    same = [f"import site; site.addsitedir({folder!r})\n" for folder in site.getsitepackages()]
    (packages / "same.pth").write_text("".join(same))
    line = "open('/proc/self/cmdline').read().replace(chr(0), ' ') + chr(10)"
    told = f"open({str(folder / 'begun')!r}, 'a').write({line})"
    (packages / "sitecustomize.py").write_text(told)
    return "env/bin/python"


@pytest.mark.slow
def test_generation_on_devices_and_in_an_environment_of_its_own_trains_alike(place, reference):
    python = another_environment(place.folder)
    engine = f'engine actor.generate = hf {{ python = "{python}" }}'
    pools = ("layout actor.generate { tp = 2 }", f"actor.generate -> reference.infer {{ stream = 8 }}\n{engine}")
    place.write(("layout actor.update   { dp = 2, zero = 3 }", "apart actor.generate, actor.update"), pools, *TRAINED)
    code, _, err = place.run("p.rlg", *THRICE, "--out", "apart", "--measure-memory")
    assert code == 0, err
    place.assert_clean()
    begun = (place.folder / "begun").read_text()
    assert begun.count("default_worker.py") == 1  # a rank, of two
    apart = place.folder / "apart"
    assert_alike(reference, apart)
    (edge,) = json.loads((apart / "plan.json").read_text())["reshards"]
    assert (edge["mode"], edge["released_bytes_per_device"]) == ("send", 0)
    assert all(x["reshard_bytes"] == edge["generate_bytes_per_device"] for x in metrics(apart) if "iteration" in x)
    # The generation's device holds its weights and nothing of the update's, the update's never lets go of its own.
    generating, updating = (held_in(apart)[f"rank {r}"] for r in range(2))
    assert abs(generating["before RELEASE actor.generate, device"] - edge["generate_bytes_per_device"]) < 20_000
    assert generating["before RELEASE actor.generate, host"] == updating["before RUN actor.infer, host"] == 0
    assert (
        generating["after, device"]
        < 20_000
        < edge["update_bytes_per_device"]
        < updating["before RUN reference.infer, device"]
    )


@pytest.mark.slow
@pytest.mark.long
def test_divided_sequences_train_alike(place, reference):
    place.write(("layout actor.update   { dp = 2, zero = 3 }", "layout actor.update { cp = 2 }"), *TRAINED)
    code, _, err = place.run("p.rlg", *THRICE, "--out", "cp")
    assert code == 0, err
    place.assert_clean()
    # The parts of a key bias's gradient all but cancel; Adam steps as far by what rounding leaves.
    assert_alike(reference, place.folder / "cp", weight=5e-5)


# The second half of a program in other words: none of it may change a result.
OTHERWISE = """dock { mode = central }
  reshard { order = staged, bucket = 100 KB }
  engine actor.update = fsdp { micro_batch = 3 }
  engine actor.generate = hf { micro_batch = 60 }
  host.advantage -> actor.update { balance = tokens }
  source -> actor.generate { stream = 3 }
  actor.generate -> host.reward { stream = 5 }
  actor.generate -> actor.infer { stream = 8, stream_tokens = 60 }
  """


@pytest.mark.slow
def test_how_it_runs_never_changes_the_result(place, reference, monkeypatch):
    """As a plan that was compiled before, too."""
    layouts = ("{ tp = 2 }", "{ dp = 2 }"), ("{ dp = 2, zero = 3 }", "{ tp = 2 }")
    place.write(*layouts, ("run { iterations", OTHERWISE + "run { iterations"), *TRAINED)
    monkeypatch.chdir(place.folder)
    assert compile_main(["p.rlg", *SMALL, "--format", "json", "-o", "plan.json"]) == 0
    code, _, err = place.run("plan.json", "--iterations", "3", "--out", "otherwise")
    assert code == 0, err
    assert_alike(reference, place.folder / "otherwise")
    place.assert_clean()


@pytest.mark.core
@pytest.mark.slow
def test_the_script_of_a_plan_runs(place, monkeypatch):
    place.write(*ONE_RANK, ("every = 40", "every = 1"))
    monkeypatch.chdir(place.folder)
    assert compile_main(["p.rlg", "--set", "prompts=4", "--set", "group=2", "--emit", "ray", "-o", "script.py"]) == 0
    # The script holds all iterations of the program: one is enough here.
    script = place.folder / "script.py"
    script.write_text(re.sub(r'"iterations":\s*\d+', '"iterations": 1', script.read_text()))
    command = [sys.executable, "script.py", "--out", "b"]
    variables = {**os.environ, "TMPDIR": str(place.temporary)}
    done = subprocess.run(
        command, cwd=place.folder, env=variables, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [x.get("evaluation") for x in metrics(place.folder / "b")] == ["held_out", None, "held_out"]
    assert re.fullmatch(r"held-out accuracy 0\.462 -> 0\.\d{3}", done.stdout.splitlines()[-1]), done.stdout
    place.assert_clean()


LIGHT = "engine actor.generate = hf\n  engine actor.update = fsdp\n  "
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
    "a layout that does not fit": (
        [("{ dp = 2, zero = 3 }", "{ tp = 4 }")],
        1,
        "error[layout-size]",
        "layout actor.update",
    ),
    "heads that cannot be divided": (
        [
            ("devices_per_node = 2", "devices_per_node = 8"),
            ("{ tp = 2 }", "{ tp = 8 }"),
            ("{ dp = 2, zero = 3 }", "{ dp = 8 }"),
        ],
        1,
        "error[layout-divide]",
        "layout actor.generate",
    ),
    "an empty data file": (
        [('"train.jsonl"', '"empty.jsonl"')],
        1,
        "error[no-data]: the data file empty.jsonl has no rows",
        "data source",
    ),
    "a row without the field": (
        [('"train.jsonl"', '"short.jsonl"')],
        1,
        "error[bad-data]: line 2 of short.jsonl has no field `answer`",
        "data source",
    ),
    "a row that is not JSON": (
        [('"train.jsonl"', '"torn.jsonl"')],
        1,
        "error[bad-data]: line 1 of torn.jsonl is not JSON",
        "data source",
    ),
    "a preset without weights": ([('"./model"', '"tiny"')], 1, "error[unknown-model]", "model policy"),
    "devices that are not here": (
        [('device = "cpu"', 'device = "h100"'), ("layout actor.update ", f"{LIGHT}layout actor.update ")],
        3,
        "error[no-resources]: the plan asks for 1 host of 2 GPU; this machine is 1 host of",
        "cluster laptop",
    ),
    "devices that are packages of dies": (
        [('device = "cpu"', 'device = "ascend-910c"')],
        1,
        "error[not-yet]",
        "cluster laptop",
    ),
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
@pytest.mark.long
def test_three_hosts_train_as_one(place, reference):
    """Three raylets on this machine: a warehouse, a function host and a rank on each, controllers on the first."""
    import ray
    from ray.cluster_utils import Cluster

    place.write(
        ("nodes = 1, devices_per_node = 2", "nodes = 3, devices_per_node = 1"),
        ("{ dp = 2, zero = 3 }", "{ dp = 3, zero = 3 }"),
        ("layout actor.generate { tp = 2 }", "reshard { mode = naive }"),
        *TRAINED,
    )
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1)
        code, _, err = place.run("p.rlg", *THRICE, "--out", "three", "--verbose", RAY_ADDRESS=cluster.address)
        assert code == 0, err
    finally:
        cluster.shutdown()
        ray.shutdown()
    three = place.folder / "three"
    assert_alike(reference, three)
    assert metrics(three)[1]["dock_bytes"]["actor.update get away"] > 0
    assert {"rank-0.log", "rank-2.log", "functions-of-host-1.log", "driver.log"} <= {
        p.name for p in (three / "logs").iterdir()
    }
    place.assert_clean()


@pytest.mark.core
@pytest.mark.slow
def test_a_function_that_fails_is_named_with_its_line(place):
    place.function("return float(response == answer) / (len(answer) - 2)")
    place.write(*ONE_RANK, MINE)
    code, _, err = place.run("p.rlg", *SMALL, "--out", "results")
    assert code == 3
    assert "error[run-failed]: `host.reward` (line 26 of p.rlg) failed on row " in err, err
    assert "ZeroDivisionError" in err and "mine.py:6" in err and "\n  response: '" in err, err
    logged = (place.folder / "results" / "logs" / err.split("all of it is in logs/")[1].split()[0]).read_text()
    assert "Traceback (most recent call last)" in logged and "ZeroDivisionError" in logged
    place.assert_clean()


HURRIED = [MINE, ("run { iterations", "dock { deadline = 3 s }\n  run { iterations")]


@pytest.mark.slow
def test_a_deadline_is_told_by_the_dock_and_work_that_never_ends_is_ended(place):
    # The first iteration's 32 rows take longer than the deadline together, a row of the second one takes for ever.
    calls = "score.calls = getattr(score, 'calls', 0) + 1\n    time.sleep(0.25 if score.calls <= 37 else 600)\n"
    place.function(f"{calls}    return 0.0")
    # Under tensor parallelism a rank waits in a collective while the first one asks.
    hurried = ("run { iterations", "dock { deadline = 5 s }\n  run { iterations")
    place.write(MINE, hurried, ("{ dp = 2, zero = 3 }", "{ tp = 2 }"), evaluated=False)
    # As a run leaves it of which all was killed: the next one removes it.
    stale = place.temporary / "msrl-run-k1lled00"
    stale.mkdir(mode=0o700)
    os.utime(stale, (0, 0))
    code, _, err = place.run("p.rlg", *SMALL, "--out", "a")
    assert code == 3
    head = (
        r"error\[run-failed\]: `actor\.update` \(group 0\) has waited \d+ s in train/1 for `advantage` from "
        r"`host\.advantage` \(32 of 32 rows"
    )
    told = (
        r"for 5 s no row has moved[^\n]*\n  functions of host 0 in host\.reward in train/1: 5 of 32 rows are done, the "
        r"last \d s ago\n  if a row may take that long, raise the deadline: `dock \{ deadline = 10 s \}`"
    )
    # The wait-for graph is asked for after the deadline: a second may have begun.
    graph = (
        r"\n  functions of host 0 has been in host\.reward in train/1 for \d+ s: 5 of 32 rows are done, the last \d+ s "
        r"ago\n  rank 0 has been in RUN actor\.update in train/1 for "
    )
    assert re.search(head, err) and re.search(told, err) and re.search(graph, err), err
    (line,) = (place.folder / "a" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["iteration"] == 0
    assert not stale.exists()
    place.assert_clean()


@pytest.mark.slow
@pytest.mark.long
def test_work_of_an_evaluation_that_never_ends_is_ended(place):
    """For whose rewards nobody waits."""
    place.function("time.sleep(600)\n    return 0.0")
    place.write(*ONE_RANK, *HURRIED)
    begin = time.monotonic()
    code, _, err = place.run("p.rlg", *SMALL, "--out", "b")
    assert code == 3 and "for 3 s no row has moved; `host.reward` took rows last and has not returned" in err, err
    assert time.monotonic() - begin < 300  # long before the function would have come back
    place.assert_clean()


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_a_run_that_is_not_to_be_started_anew(place):
    place.write(("seed = 0 }", "seed = 0, restarts = 0 }"))
    process = place.start("p.rlg", *SMALL, "--out", "results", "--nice", "3")
    place.wait_for_lines("results", 4)
    # Not Ray's own agents, which have such titles too.
    workers = [p for p in place.processes() if re.search(rb"ray::.*Host", Path(f"/proc/{p}/cmdline").read_bytes())]
    assert {os.getpriority(os.PRIO_PROCESS, p) - os.nice(0) for p in workers} == {3}
    ranks = [p for p in place.processes() if b"ray::Rank" in Path(f"/proc/{p}/cmdline").read_bytes()]
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    begin = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 3 and time.monotonic() - begin < 30
    assert "error[run-failed]: rank " in err and " died in " in err and "\n  rank 0 has been in " in err, err
    place.assert_clean()
