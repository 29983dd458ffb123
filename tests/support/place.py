"""A folder with the example in it, where `msrl-run` is tried as a user would: what it prints, computes and leaves
behind."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import pytest
import warm_preload

from msrl_graph.ir.metrics import find_metric
from msrl_graph.ir.plan import from_json

ROOT = Path(__file__).parents[2]
SUPPORT = str(Path(__file__).parent)
EXAMPLE = ROOT / "examples" / "arithmetic"
PROGRAM = (EXAMPLE / "grpo.rlg").read_text()
SMALL = ["--set", "prompts=8", "--set", "group=4"]


class Place:
    """A folder with the example in it, and a temporary folder of its own, to see what is left behind."""

    patience = 200.0  # seconds for a run

    def __init__(self, folder):
        self.folder = folder
        for item in ("train.jsonl", "test.jsonl", "model"):
            (folder / item).symlink_to(EXAMPLE / item)
        self.temporary = Path(tempfile.mkdtemp(prefix="m", dir="/tmp"))  # short: Ray's sockets lie below it

    def write(self, *changes, evaluated=True):
        """The example's program, its text changed; with or without evaluations."""
        text = PROGRAM
        for old, new in changes:
            assert old in text, old
            text = text.replace(old, new)
        # So few rows as most tests have are one mini-batch.
        text = text.replace("mini_batch = 256", "mini_batch = prompts * group")
        if not evaluated:
            text = "\n".join(line for line in text.split("\n") if "evaluate" not in line)
        (self.folder / "p.rlg").write_text(text)
        return text

    def function(self, body):
        """A file with a function `score`, which `MINE` makes the reward."""
        (self.folder / "mine.py").write_text(
            f"import os\nimport time\n\n\ndef score(response: str, answer: str) -> float:\n    {body}\n"
        )

    def start(self, *arguments, **environment):
        command = [
            sys.executable,
            "-c",
            f"import sys; {self._warmed(environment)}from msrl_graph.cli import run_main; sys.exit(run_main())",
            *arguments,
        ]
        variables = {**os.environ, "TMPDIR": str(self.temporary), **environment}
        for name in ("MSRL_DEBUG", "TORCHINDUCTOR_CACHE_DIR"):  # torch sets the latter where a test loads it
            variables.pop(name, None)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        # Whoever started the tests in the background may have had SIGINT ignored, which children inherit.
        heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        return subprocess.Popen(command, cwd=self.folder, env=variables, preexec_fn=heed, **pipes)

    def _warmed(self, environment):
        """Statements that let a warm process fork the run's preload server.

        There are none for a run with environment variables of its own, which could change what is imported.
        """
        if environment:
            return ""
        return f"sys.path.insert(0, {SUPPORT!r}); import warm_preload; warm_preload.use({warm_preload.address()!r}); "

    def run(self, *arguments, **environment):
        process = self.start(*arguments, **environment)
        out, err = process.communicate(timeout=self.patience)
        if process.returncode == 0 and "--out" in arguments:
            assert_registered(self.folder / arguments[arguments.index("--out") + 1])
        return process.returncode, out, err

    def wait_for_lines(self, out, count, within=120.0):
        """Until the run has written so many lines of metrics."""
        log = self.folder / out / "metrics.jsonl"
        until = time.monotonic() + within
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


def ran(place, *arguments):
    """Runs the program of a place to its end."""
    code, _, err = place.run("p.rlg", *arguments)
    assert code == 0, err
    place.assert_clean()


def rows_of(folder, iteration, level=""):
    """The rows that a run recorded, as a table; of several generations those of one."""
    from pyarrow import parquet

    return parquet.read_table(folder / "rows" / level / f"{iteration:06d}.parquet")


ONE_RANK = [
    ("devices_per_node = 2", "devices_per_node = 1"),
    ("layout actor.update   { dp = 2, zero = 3 }", "layout actor.update   { dp = 1 }"),
    ("layout actor.generate { tp = 2 }", "layout actor.generate { dp = 1 }"),
]
# Six optimizer steps an iteration, the last mini-batch a short one; an evaluation, greedy on two responses, after each.
TRAINED = [
    ("mini_batch = 256", "mini_batch = 12, epochs = 2"),
    ("every = 40", "every = 1"),
    ("samples = 1, temperature", "samples = 2, temperature"),
]
THRICE = [*SMALL, "--iterations", "3"]
# The reward is the function of Place.function.
MINE = ("call = exact_match()", 'call = "mine.py:score"')


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_registered(folder):
    """Each key of each line is a metric of the registry."""
    if not (folder / "metrics.jsonl").is_file():
        return
    graph = from_json((folder / "plan.json").read_text()).graph
    keys = {(key, "evaluation" in line) for line in metrics(folder) for key in line}
    missing = sorted(key for key, evaluates in keys if find_metric(key, graph, evaluates) is None)
    assert not missing, f"add {missing} to ir/iteration_metrics.py or ir/metrics.py"


def weights(folder, of="weights/actor"):
    from safetensors.numpy import load_file

    return load_file(folder / of / "model.safetensors")


def assert_alike(one, other, rel=1e-4, weight=1e-5):
    """Two runs whose files lie in these folders computed the same but for rounding, and on each trainer and generator
    agreed."""
    for a, b in zip(metrics(one), metrics(other), strict=True):
        for key in ("reward", "loss", "grad_norm", "response_tokens", "loss/kl", "rows", "updates"):
            if key in a:
                assert b[key] == pytest.approx(a[key], rel=rel, abs=1e-7), key
        for line in (a, b):
            if "iteration" in line:
                assert 0 < line["logp_drift"] <= line["logp_drift_max"] < 1e-4 and line["skipped"] == 0
    mine = weights(one)
    theirs = weights(other)
    assert all(abs(value - theirs[tensor]).max() < weight for tensor, value in mine.items())
