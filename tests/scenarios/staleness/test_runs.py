"""Staleness: generation goes on while the update learns, or before it on the same devices, with weights that are at
most so many versions old."""

import os
import signal

import pytest
from place import MINE, SMALL, metrics, ran, rows_of
from stale_runs import APART, named, off, saved, stale


def apart(model, rows):
    """How far the model's log-probabilities are from those with which these rows were drawn, at most."""
    return max(float(off(model, row).max()) for row in rows)


@pytest.mark.core
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("versions", [1, 2])
def test_no_row_is_older_than_the_edge_allows_and_each_is_of_the_version_that_is_told(place, versions):
    """What the generator says of each row is what the weights of that version, from the checkpoint, say of it."""
    place.write(*APART, stale(versions), ("seed = 0", "seed = 0, save = 1, keep = 9"), ("every = 40", "every = 3"))
    ran(place, *SMALL, "--iterations", "8", "--record", "--out", "out")
    lines = [line for line in metrics(place.folder / "out") if "iteration" in line]
    assert [line["rows"] for line in lines] == [32] * 8
    behind = [int(line["staleness"]) for line in lines]
    assert behind == [line["staleness_max"] for line in lines] and behind[0] == 0 and 1 <= max(behind) <= versions
    for line, versions_behind in zip(lines, behind, strict=True):
        told = {key: line[key] for key in line if key.startswith("logp_drift")}
        of = f"/{versions_behind}" if versions_behind else ""
        assert told.keys() == {f"logp_drift{of}", f"logp_drift_max{of}"}
        assert (told[f"logp_drift{of}"] > 1e-4) == bool(versions_behind), "by rounding alone, or by the steps since"
    for number in (0, 1, 4, 7):
        rows = rows_of(place.folder / "out", number).to_pylist()[:8]
        version = number - behind[number]
        assert all(row["made"] == [version] * len(row["response"]) for row in rows)
        assert apart(saved(place, "out", version), rows) < 1e-5
        assert version == 0 or apart(saved(place, "out", version - 1), rows) > 1e-4


@pytest.mark.slow
def test_a_deterministic_run_has_the_same_rows_whoever_is_slow_and_whatever_is_killed(place):
    """Once as it comes; once with a reward that takes its time, so that generation is far ahead, and killed.
    Every other version is sent, and that of each checkpoint; what is there already is not fetched again."""
    place.function("return float(len(response) % 2)")
    program = [*APART, stale(2, every=2), MINE, ("seed = 0", "seed = 0, save = 5, keep = 9, deterministic = true")]
    place.write(*program, evaluated=False)
    ran(place, *SMALL, "--iterations", "10", "--record", "--out", "first")
    place.function("time.sleep(0.02)\n    return float(len(response) % 2)")
    process = place.start("p.rlg", *SMALL, "--iterations", "10", "--record", "--out", "second")
    place.wait_for_lines("second", 8)
    os.kill(next(p for p in place.processes() if named(p).startswith("ray::RankHost")), signal.SIGKILL)
    _, err = process.communicate(timeout=place.patience)
    assert process.returncode == 0 and err.count("restarting") == 1, err
    first, second = (metrics(place.folder / out) for out in ("first", "second"))
    assert [line["iteration"] - line["staleness"] for line in first] == [0, 0, 0, 2, 2, 5, 5, 5, 6, 8]
    assert [line["reshard_bytes"] > 0 for line in first] == [True, *(number in (3, 5, 8, 9) for number in range(1, 10))]
    for key in ("staleness", "rows", "reward", "response_tokens", "loss", "reshard_bytes"):
        assert [line[key] for line in first] == [line[key] for line in second]
    for number in range(10):
        assert rows_of(place.folder / "first", number).equals(rows_of(place.folder / "second", number))


def ahead(place):
    """A run that generates on the devices of the update, one version ahead."""
    place.function("time.sleep(0.02)\n    return float(len(response) % 2)")
    layouts = [item for item in APART if not item[0].startswith("layout")]
    run = ("seed = 0", "seed = 0, save = 4, keep = 9, deterministic = true")
    place.write(*layouts, stale(1), MINE, run, evaluated=False)
    ran(place, *SMALL, "--iterations", "8", "--record", "--out", "first")


@pytest.mark.slow
def test_on_the_same_devices_the_next_rows_are_drawn_before_the_update(place):
    """With the weights that it begins with; rewards come meanwhile. A checkpoint is of a moment at which nothing is
    ahead."""
    ahead(place)
    first = metrics(place.folder / "first")
    assert [line["staleness"] for line in first] == [0, 1, 1, 1, 0, 1, 1, 1]
    for number in range(8):
        rows = rows_of(place.folder / "first", number)
        assert {v for made in rows["made"].to_pylist() for v in made} == {number - int(first[number]["staleness"])}
    drawn = rows_of(place.folder / "first", 4).to_pylist()
    assert apart(saved(place, "first", 4), drawn[:8]) < 1e-5
    assert apart(saved(place, "first", 4), rows_of(place.folder / "first", 5).to_pylist()[:8]) < 1e-5


@pytest.mark.slow
@pytest.mark.long
def test_on_the_same_devices_too_rows_are_the_same_whatever_is_killed(place):
    ahead(place)
    process = place.start("p.rlg", *SMALL, "--iterations", "8", "--record", "--out", "second")
    place.wait_for_lines("second", 7)
    os.kill(next(p for p in place.processes() if named(p).startswith("ray::RankHost")), signal.SIGKILL)
    _, err = process.communicate(timeout=place.patience)
    assert process.returncode == 0 and err.count("restarting") == 1, err
    for one, other in zip(*(metrics(place.folder / out) for out in ("first", "second")), strict=True):
        assert all(
            one.get(key) == other.get(key) for key in ("staleness", "rows", "reward", "loss", "after_iterations")
        )
    for number in range(8):
        assert rows_of(place.folder / "first", number).equals(rows_of(place.folder / "second", number))
