"""What was measured of this machine: the file comes back as it was written, and one that cannot be used is told in a
warning."""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from place import Place

from msrl_graph import compile
from msrl_graph.cli import doctor
from msrl_graph.compiler.pipeline import translate
from msrl_graph.compiler.sources import read_source
from msrl_graph.diagnostics import Diagnostic
from msrl_graph.hardware import calibration
from msrl_graph.hardware.calibration import CURVES, VERSION, BusyRates, Calibration
from msrl_graph.hardware.cluster import ClusterSpec, Figure, rate_at
from msrl_graph.hardware.device_presets import DEVICES

CURVE = ((1e3, 1e9), (1e6, 5e10), (1e9, 1e11))
KINDS = dict.fromkeys(("all_reduce", "all_gather", "reduce_scatter", "broadcast"), (1e-4, 2e9))
FOUND = Calibration(
    version=VERSION,
    date="2026-01-02",
    seconds=60.0,
    machine=calibration.this_machine(),
    versions={"torch": "2.10"},
    noise=0.03,
    turn=4e-3,
    handover=3e-3,
    share=2e-3,
    function=1e-5,
    busy={
        n: BusyRates(max(1, 2 // n), 6e-6 * n, 5e-6 * n, 4e9 / n, dict.fromkeys(CURVES, CURVE), KINDS if n > 1 else {})
        for n in (1, 2, 4)
    },
)
PROGRAM = """import grpo
cluster laptop { device = "here", devices_per_node = 2 }
deploy grpo on laptop { model policy = "tiny" }
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "settings" / "here.json"
    calibration.write(FOUND, path)
    monkeypatch.setenv("MSRL_HERE", str(path))
    return path


def test_a_file_comes_back_as_it_was_written(file: Path) -> None:
    assert calibration.read(file) == FOUND


def edited(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def curve_of(points: list[list[float]]) -> dict[str, object]:
    busy = {
        "threads": 1,
        "launch": 1e-5,
        "row": 1e-5,
        "copy": 1e9,
        "curves": {**{k: [[1, 1]] for k in CURVES}, "f32": points},
        "collectives": {},
    }
    return {"1": busy}


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda p: p.unlink(), "cannot be read: no such file or directory"),
        (lambda p: (p.unlink(), p.mkdir()), "cannot be read: is a directory"),
        (lambda p: p.write_bytes(b""), "holds no calibration"),
        (lambda p: p.write_bytes(b"\xff\x00"), "holds no calibration"),
        (lambda p: p.write_text(p.read_text()[:-50]), "holds no calibration"),
        (lambda p: p.write_text("[]"), "holds no calibration"),
        (
            lambda p: edited(p, version=VERSION + 1),
            f"has version {VERSION + 1}, but this program needs version {VERSION}",
        ),
        (lambda p: edited(p, version="new"), "has version new"),
        (lambda p: edited(p, handover="fast"), "holds no calibration"),
        (lambda p: edited(p, handover=-1), "a figure of the runtime is not a positive number"),
        (lambda p: edited(p, busy={}), "nothing was measured"),
        (lambda p: edited(p, busy=curve_of([[1, -1]])), "a figure of 1 ranks is not a positive number"),
        (lambda p: edited(p, busy=curve_of([])), "figures of 1 ranks are missing"),
        (lambda p: edited(p, busy=curve_of([[2, 1], [1, 1]])), "the sizes of a curve of 1 ranks do not rise"),
        (
            lambda p: edited(p, machine={"processor": "another", "cores": 64, "memory": 1}),
            "belongs to another machine (another, 64 cores; ",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_one_warning(file: Path, spoil: object, words: str) -> None:
    spoil(file)  # type: ignore[operator]
    told = calibration.read(file)
    assert isinstance(told, Diagnostic) and (told.code, told.severity) == ("calibration", "warning")
    assert words in told.message and told.message.endswith("assumed figures are used instead")
    # The compiler says it once, where the program asks for this machine, and plans with what is assumed.
    result = translate(read_source("p.rlg", PROGRAM))
    assert [d.code for d in result.warnings if d.code == "calibration"] == ["calibration"]
    assert next(d.span.line for d in result.warnings if d.code == "calibration") == 2
    assert result.plan is not None and result.plan.cluster.device == DEVICES["here"]


def test_here_is_what_was_measured_with_as_many_ranks(file: Path) -> None:
    device = compile("p.rlg", text=PROGRAM).cluster.device
    assert device == calibration.device(FOUND, "here", 2)
    figures = (device.launch, device.memory_bandwidth, device.flops["f32"], device.latency, device.overheads.handover)
    assert {f.source for f in figures} == {"measured"}
    assert all("2026-01-02, 2 ranks busy" in f.basis for f in figures)
    assert device.launch.value == 12e-6 and device.flops["f32"].value == pytest.approx(1e11)


def test_without_a_file_nothing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("MSRL_HERE", ""), ("XDG_CONFIG_HOME", str(tmp_path))):
        monkeypatch.setenv(name, value)
        result = translate(read_source("p.rlg", PROGRAM))
        assert "calibration" not in {d.code for d in result.warnings}
        assert result.plan is not None and result.plan.cluster.device == DEVICES["here"]
        monkeypatch.delenv("MSRL_HERE", raising=False)


def test_what_a_program_states_comes_before_what_was_measured(file: Path) -> None:
    text = PROGRAM.replace('"here"', '"here", flops_f32 = 2 TFLOP/s, launch = 1 us')
    device = compile("p.rlg", text=text).cluster.device
    assert (
        device.flops["f32"] == Figure(2e12, "stated", "the program") and device.rate("f32", 1e6).value == 0.4 * 2e12
    )  # a peak
    assert device.launch.value == pytest.approx(1e-6)
    cluster = replace(
        compile("p.rlg", text=text).cluster, device=replace(device, memory_bandwidth=Figure(1.0, "assumed"))
    )
    assert calibration.apply_calibration(cluster)[0].device == device
    other = ClusterSpec("far", DEVICES["h100"], 1, 8, Figure(1e9, "assumed"))
    assert calibration.apply_calibration(other) == (other, [])


def test_more_ranks_than_were_measured_share_what_there_is() -> None:
    most = FOUND.rates_for(4)
    more = FOUND.rates_for(8)
    assert FOUND.rates_for(3) == most
    assert more.launch == 2 * most.launch and more.curves["f32"][0] == (1e3, 0.5e9)
    assert more.collectives["broadcast"] == (2e-4, 1e9)


@given(st.floats(1, 1e12), st.floats(1, 1e12))
def test_a_curve_takes_no_less_for_more(a: float, b: float) -> None:
    small, large = sorted((a, b))
    assert small / rate_at(CURVE, small) <= large / rate_at(CURVE, large) * (1 + 1e-9)
    assert rate_at(CURVE, CURVE[1][0]) == pytest.approx(CURVE[1][1])


def test_the_doctor_says_what_there_is(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert doctor.main([]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for words in ("ok packages torch", "fsdp and hf run here; megatron needs megatron-core", "ok speed measured"):
        assert words in out
    assert "2 ranks of 1 thread 100 GFLOP/s f32, 100 bf16" in out and "3.0% between measurements" in out
    file.write_text("{")
    assert doctor.main([]) == 0
    assert "warning speed " in " ".join(capsys.readouterr().out.split())
    monkeypatch.setenv("MSRL_HERE", "")
    assert doctor.main([]) == 0
    assert "(msrl-doctor --calibrate)" in " ".join(capsys.readouterr().out.split())
    for wrong in (["--out", "x"], ["--calibrate"]):
        with pytest.raises(SystemExit) as ended:
            doctor.main(wrong)
        assert ended.value.code == 2


def test_a_call_that_takes_longer_than_its_budget_is_made_twice() -> None:
    """A product of matrices takes seconds on cores that have no instructions for its type."""
    from msrl_graph.runtime.calibrate import probes

    calls: list[float] = []

    def action() -> None:
        calls.append(time.perf_counter())
        time.sleep(0.05)

    assert 0.05 <= probes.seconds(action, budget=0.04) < 5 and len(calls) == 2
    calls.clear()
    probes.seconds(action, budget=0.6)
    assert len(calls) > 2


@pytest.mark.slow
def test_a_short_calibration_of_this_machine(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    from msrl_graph.runtime.calibrate.measure import measure

    monkeypatch.setattr(tempfile, "tempdir", str(place.temporary))
    monkeypatch.setenv("TMPDIR", str(place.temporary))
    path = place.folder / "here.json"
    sizes = {"prompts": "8", "group": "2", "prompt_len": "8", "response_len": "8"}
    measure(compile("grpo", model="tiny", sets=sizes), path, rounds=1, most=2)
    found = calibration.read(path)
    assert isinstance(found, Calibration), found
    assert set(found.busy) == {1, 2} and set(found.busy[2].collectives) == set(KINDS)
    # Wide bounds: how busy this machine is decides what is measured.
    assert 1e-8 < found.busy[1].launch < 0.1 and 1e6 < rate_at(found.busy[1].curves["f32"], 1e9) < 1e15
    assert 0 < found.handover < 100 and found.noise >= 0
    place.assert_clean()
