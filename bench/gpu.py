"""Speed, memory and predictions on one GPU, next to trl with the same recipe.

For a bare machine with one GPU (with_wheels.py brings packages to one without a network), in at most --minutes. Each
job is a process with a time limit; if it fails or runs over, that is reported and the others go on. Jobs run in the
order of their worth, ours and trl in turn. A job that has too little time left is left out. Weights are random, in the
shapes of published models. Lengths of responses are stated for both sides (stated_lengths.py). Weights are bfloat16 on
both sides. Our optimizer has master weights and moments in float32, trl's moments are bfloat16. Cases (gpu_cases.py):

- 0.5B: GRPO with 64 prompts and 8 responses each, lognormal up to 1,024 tokens, generated. The generator is vllm if it
  is installed; trl's is vLLM too. Otherwise transformers generates on both sides, up to 256 tokens.
- 1.5B, 4B, 16k: the tokens of responses are random numbers and no generation is measured: infer and update of rows of
  4,096 tokens (1.5B), of lognormal lengths (4B, 16 prompts), and of 16,384 tokens (0.5B).

MFU: the FLOP of the rows (`forward_flop` in gpu_cases.py; an update has three times as many), over seconds times the
device's peak in bfloat16. Share of the bandwidth in decoding: weights in each step and the KV cache of running rows,
over seconds times the device's peak. Predicted seconds are compared twice: with the assumed rates of a plan, and with
rates of the device that the first job measures (gpu_rates.py).

Writes each finished job as a line of JSON to `figures.jsonl` in --out at once, what the jobs print to `log.txt`, and
the output of tests/on_gpu (--tests, in the time that is left) to `tests.txt`. Prints tables and, last, a line of JSON
with the figures and with the aims: 1.5 x trl, an MFU of 40 % in the update at 1.5B, at most 5 % of an iteration outside
generation, infer and update, and predictions within 15 % with measured rates.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import gpu_cases
import smoke
import stated_lengths
from gpu_cases import SIDES, installed
from rich.console import Console
from rich.table import Table

from msrl_graph.hardware.device_presets import find_preset

HERE = Path(__file__).parent
TRL = HERE.parent / ".venv-trl" / "bin" / "python"
PATIENCE = 20.0  # seconds in which a job ends after a signal
LEAST = 0.5  # share of a job's seconds that must be left to start it
# (case, side, seconds at most), the most valuable first. A second round of a pair comes after the other cases.
JOBS = (
    ("0.5B", "eager", 100),
    ("0.5B", "trl", 120),
    ("1.5B", "compiled", 90),
    ("0.5B", "compiled", 100),
    ("4B", "eager", 100),
    ("16k", "eager", 60),
    ("1.5B", "eager", 70),
    ("0.5B", "megatron", 90),
    ("0.5B", "trl", 120),
    ("0.5B", "eager", 100),
)
ALL = {f"{case_name} {side_name}" for case_name, side_name, _ in JOBS}
FEW = {"0.5B eager", "0.5B trl", "1.5B eager", "0.5B megatron"}  # with --smoke
AIMS = {"times_trl": 1.5, "update_mfu": 0.4, "outside_share": 0.05, "prediction_error": 0.15}


@dataclass
class Session:
    """What all jobs share: where they run, until when, and what they have found.

    `site`: a folder for PYTHONPATH with the engines of stated lengths. `rates`: of the device, once they are measured.
    """

    options: argparse.Namespace
    folder: Path
    site: Path
    log: TextIO
    end: float
    rates: dict[str, Any] | None = None
    results: list[dict[str, Any]] = field(default_factory=list)

    @property
    def left(self) -> float:
        return self.end - time.monotonic()

    def call(self, command: list[str], seconds: float, environment: dict[str, str], output: TextIO) -> str:
        """Run a command; return why it failed, or "". It is ended after `seconds`, and with it what it started."""
        child = subprocess.Popen(
            command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=environment, start_new_session=True
        )
        reason = ""
        try:
            if status := child.wait(seconds):
                reason = f"it ended with status {status}"
        except subprocess.TimeoutExpired:
            reason = f"it ran over its {seconds:.0f} s"
            child.terminate()  # a run ends its processes
            with suppress(subprocess.TimeoutExpired):
                child.wait(PATIENCE)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        return reason

    def environment(self) -> dict[str, str]:
        paths = (str(self.site), str(HERE.parent), os.environ.get("PYTHONPATH", ""))
        quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1", "MSRL_HERE": ""}
        return os.environ | quiet | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}

    def record(self, result: dict[str, Any]) -> None:
        """Keep a result, on the disk too."""
        self.results.append(result)
        with (self.options.out / "figures.jsonl").open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(f"{job_name(result)}: {describe(result)}", file=sys.stderr, flush=True)


def job_name(result: dict[str, Any]) -> str:
    return f"{result['case']} {result['side']}"


def describe(result: dict[str, Any]) -> str:
    parts = [f"{result['took']:.0f} s"]
    if "seconds" in (figures := result.get("figures", {})):
        parts.insert(0, f"{figures['seconds']:.3f} s an iteration, {figures['iterations']} of them")
    return "; ".join([*parts, *([result["failed"]] if result.get("failed") else [])])


def find_device() -> str:
    """Return the preset of this machine's GPU, or `cpu`. No memory of the GPU stays taken: another process asks.

    Raises SystemExit for a GPU that no preset has the figures of.
    """
    code = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    name = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    preset = find_preset(name) if name else "cpu"
    if not preset:
        raise SystemExit(f"no preset has the figures of {name}: state one with --device")
    return preset


def measure_rates(session: Session) -> None:
    start = time.monotonic()
    path = session.folder / "rates.json"
    where = "cpu" if session.options.device == "cpu" else "cuda"
    code = f"import json, gpu_rates; print(json.dumps(gpu_rates.measure({where!r}, {session.options.tiny})))"
    with path.open("w") as output:
        environment = session.environment()
        command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(HERE)!r}); {code}"]
        limit = min(60.0 * session.options.patience, session.left - PATIENCE)
        failed = session.call(command, limit, environment, output)
    try:
        session.rates = json.loads(path.read_text().splitlines()[-1])
    except (ValueError, IndexError):
        session.log.write(path.read_text())
        failed = failed or "it printed no rates"
    result = {"case": "rates", "side": session.options.device, "took": time.monotonic() - start, "failed": failed}
    session.record(result | {"rates": session.rates})


def run_job(session: Session, case_name: str, side_name: str, seconds: float) -> None:
    """Run a side of a case and record its figures, or why there are none."""
    start = time.monotonic()
    options = session.options
    case = gpu_cases.find_case(case_name, options.tiny)
    limit = min(seconds * options.patience, session.left - PATIENCE)
    folder = session.folder / f"{case_name}-{len(session.results)}"
    result: dict[str, Any] = {"case": case_name, "side": side_name, "tokens": case.tokens}
    session.log.write(f"\n{case_name}, {side_name}\n")
    session.log.flush()
    figures: dict[str, Any] = {}
    failed = ""
    try:
        models = session.folder / case_name  # a case's sides share its model
        models.mkdir(exist_ok=True)
        environment = session.environment()
        words = (str(models), options.device, *(["tiny"] if options.tiny else []))
        program = (sys.executable, str(HERE / "gpu_cases.py"), case_name)
        if not (models / case.preset).exists():
            failed = session.call([*program, gpu_cases.MODEL, *words], limit, environment, session.log)
            limit -= time.monotonic() - start
        command = [*program, side_name, *words]
        if side_name == "trl":
            folder.mkdir()
            command, environment = trl_command(session, case, models, folder)
        failed = failed or session.call(command, limit, environment, session.log)
        if side_name == "trl":
            figures = gpu_cases.trl_figures(case, folder)
        else:
            (models / side_name).rename(folder)
            figures = gpu_cases.our_figures(case, folder, session.rates)
            shutil.rmtree(folder)  # its weights
    except Exception as error:  # of a job: the others go on
        failed = "; ".join(filter(None, (failed, f"{type(error).__name__}: {error}")))
    session.record(result | {"took": time.monotonic() - start, "failed": failed, "figures": figures})


def trl_command(session: Session, case: gpu_cases.Case, models: Path, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Return the command of trl's side, and its environment."""
    options = session.options
    model = models / case.preset
    own = TRL.exists()
    environment = session.environment() | {"PYTHONSAFEPATH": "1", "TMPDIR": str(folder)}
    if own:  # an environment of its own
        del environment["PYTHONPATH"]
    flags: dict[str, Any] = {
        "example": gpu_cases.EXAMPLE,
        "model": model,
        "lengths": model / stated_lengths.FILE,
        "lines": folder / "metrics.jsonl",
        "iterations": case.iterations,
        "threads": os.cpu_count() or 1,
        "prompts": case.prompts,
        "group": case.group,
        "response": case.tokens,
        "rows": min(8, case.rows // case.steps),
    }
    command = [str(TRL) if own else sys.executable, str(HERE / "trl_side.py")]
    command += [f"--{name}={value}" for name, value in flags.items()]
    if options.device != "cpu":
        command += ["--gpu", *(["--vllm=0.3"] if not own and gpu_cases.generator(case) == "vllm" else [])]
    return command, environment


def run_tests(session: Session) -> None:
    start = time.monotonic()
    with (session.options.out / "tests.txt").open("w") as output:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-v",
            "-s",
            "-p",
            "no:cacheprovider",
            str(HERE.parent / "tests" / "on_gpu"),
        ]
        failed = session.call(command, session.left - PATIENCE, session.environment(), output)
    last = (session.options.out / "tests.txt").read_text(errors="replace").strip().splitlines()[-1:]
    session.record(
        {"case": "tests", "side": "on_gpu", "took": time.monotonic() - start, "failed": failed, "last": last}
    )


def can_run(side_name: str) -> bool:
    """Return whether the packages of a side are here."""
    if side_name == "trl":
        return TRL.exists() or installed("trl")
    return SIDES[side_name].trainer != "megatron" or installed("megatron-core")


def jobs(options: argparse.Namespace) -> Iterator[tuple[str, str, float]]:
    for case_name, side_name, seconds in dict.fromkeys(JOBS) if options.tiny else JOBS:
        if f"{case_name} {side_name}" in (options.only or (FEW if options.tiny else ALL)):
            yield case_name, side_name, float(seconds)


def best(results: list[dict[str, Any]], case_name: str, side_names: tuple[str, ...]) -> dict[str, Any]:
    """Return the figures of the fastest job of these sides; {} if none has any."""
    found = [
        result["figures"]
        for result in results
        if result["case"] == case_name and result["side"] in side_names and result.get("figures")
    ]
    return min(found, key=lambda figures: figures["seconds"], default={})


def aims(results: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the value, the bar, and whether it is met, of each aim that could be measured."""
    ours = best(results, "0.5B", ("eager", "compiled", "megatron"))
    trl = best(results, "0.5B", ("trl",))
    large = best(results, "1.5B", ("eager", "compiled"))
    values: dict[str, float] = {}
    if ours and trl:
        values["times_trl"] = trl["seconds"] / ours["seconds"]
    if large:
        values["update_mfu"] = large["mfu"]["update"]
    if ours:
        values["outside_share"] = ours["outside_share"]
    errors = [
        abs(ratio - 1)
        for result in results
        for name, ratio in result.get("figures", {}).get("predicted_over_measured", {}).get("calibrated", {}).items()
        if name in ("iteration", "actor.update")
    ]
    if errors:
        values["prediction_error"] = max(errors)
    at_least = ("times_trl", "update_mfu")
    return {
        name: {
            "value": round(value, 4),
            "bar": AIMS[name],
            "met": value >= AIMS[name] if name in at_least else value <= AIMS[name],
        }
        for name, value in values.items()
    }


def report(results: list[dict[str, Any]]) -> None:
    console = Console(width=150)
    jobs_done = [result for result in results if result.get("figures")]

    def table(title: str, *headings: str) -> Table:
        made = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
        for number, heading in enumerate(headings):
            made.add_column(heading, justify="right" if number > 1 else "left", no_wrap=True)
        return made

    speed = table("an iteration", "case", "side", "responses/s", "s", "generate", "ref", "infer", "update", "outside")
    rates = table("shares of peaks", "case", "side", "MFU update", "MFU infer", "bandwidth in decoding", "peak bytes")
    memory = table(
        "peak memory (planned: with all responses at their bound)",
        "case",
        "side",
        "phase",
        "planned",
        "measured",
        "ratio",
    )
    ratios = table("predicted / measured", "case", "side", "rates", *gpu_cases.COMPUTE, "iteration")
    for result in jobs_done:
        figures = result["figures"]
        name = (result["case"], result["side"])
        phases = figures["phases"]
        speed.add_row(
            *name,
            f"{figures['responses_per_s']:,.1f}",
            f"{figures['seconds']:.3f}",
            *(f"{phases[phase]:.3f}" for phase in gpu_cases.COMPUTE),
            f"{figures['outside_share']:.1%}",
        )
        mfu = figures.get("mfu", {})
        decoding = figures.get("decode_bandwidth_share")
        rates.add_row(
            *name,
            *(f"{mfu[phase]:.1%}" if mfu else "" for phase in ("update", "infer")),
            f"{decoding:.1%}" if decoding else "",
            f"{figures['peak_bytes'] / 1e9:.2f} GB" if "peak_bytes" in figures else "",
        )
        for phase, sizes in figures.get("memory", {}).items():
            planned, measured = (sizes[kind] for kind in ("planned", "measured"))
            memory.add_row(
                *name, phase, f"{planned / 1e9:.3f} GB", f"{measured / 1e9:.3f} GB", f"{planned / measured:.2f}"
            )
        for kind, own in figures.get("predicted_over_measured", {}).items():
            shown = (f"{own[phase]:.2f}" if phase in own else "" for phase in (*gpu_cases.COMPUTE, "iteration"))
            ratios.add_row(*name, kind, *shown)
    for made in (speed, rates, memory, ratios):
        if made.row_count:
            console.print(made)
            console.print()
    for result in results:
        if result.get("failed"):
            console.print(f"{job_name(result)}: {result['failed']}")
    for name, aim in aims(results).items():
        console.print(f"{name}: {aim['value']} (aim {aim['bar']}): {'met' if aim['met'] else 'missed'}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="time for everything, the tests included")
    parser.add_argument("--out", type=Path, help="a folder for figures and logs (default: a temporary one)")
    parser.add_argument("--device", default="", help="a preset (default: this machine's GPU)")
    parser.add_argument("--only", action="append", metavar="'CASE SIDE'", help="only this job; may be repeated")
    parser.add_argument("--tests", action="store_true", help="run tests/on_gpu in the time that is left")
    parser.set_defaults(tiny=False, patience=1.0)
    # A busy machine without a GPU is slow: no job of the smoke is ended early.
    options = smoke.parse(parser, tiny=True, minutes=9.0, device="cpu", patience=3.0)
    start = time.monotonic()
    options.device = options.device or find_device()
    options.out = options.out or Path(tempfile.mkdtemp(prefix="bench-gpu-"))
    options.out.mkdir(parents=True, exist_ok=True)
    left_out = []
    with tempfile.TemporaryDirectory() as name, (options.out / "log.txt").open("a") as log:
        site = Path(name) / "site"
        site.mkdir()
        stated_lengths.install(site)
        sys.path.append(str(site))  # the plans of runs name its engines
        session = Session(options, Path(name), site, log, start + 60 * options.minutes)
        print(f"figures go to {options.out} as they come", file=sys.stderr, flush=True)
        measure_rates(session)
        for case_name, side_name, seconds in jobs(options):
            if not can_run(side_name):
                left_out.append(f"{case_name} {side_name}: its packages are not installed")
            elif session.left < LEAST * seconds:
                left_out.append(f"{case_name} {side_name}: {session.left:.0f} s were left")
            else:
                run_job(session, case_name, side_name, seconds)
        if options.tests and session.left > 2 * PATIENCE:
            run_tests(session)
    report(session.results)
    for words in left_out:
        print(f"left out: {words}")
    shown = [{"job": job_name(r), **r["figures"]} for r in session.results if r.get("figures")]
    failed = [f"{job_name(r)}: {r['failed']}" for r in session.results if r.get("failed")]
    last = {"aims": aims(session.results), "figures": shown, "failed": failed, "left_out": left_out}
    print(json.dumps(last))
    return 1 if options.tiny and failed else 0


if __name__ == "__main__":
    sys.exit(main())
