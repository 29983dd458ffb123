"""Runs in which some weights are not trained: they never change, are sent once, and a resume may choose others."""

import numpy as np
import pytest
from place import EXAMPLE, SMALL, metrics, ran, weights
from stale_runs import APART, stale

from msrl_graph import compile

pytestmark = pytest.mark.slow
WORKER = "worker actor     : policy"
SAVED = ("seed = 0 }", "seed = 0, save = 2 }")
BOTTOM = ("model.embed_tokens.", "model.layers.0.")


def keeping(*words):
    return (WORKER, f"{WORKER} {{ freeze = [{', '.join(map(repr, words)).replace(chr(39), chr(34))}] }}")


KEPT = keeping("embeddings", "model.layers.0.*")


def changed(one, other):
    """The weights that differ."""
    return {name for name, value in one.items() if not np.array_equal(value, other[name])}


def assert_sent_once(place, folder):
    """Beginning with the second iteration, what ranks receive is what is planned, and less than in the first."""
    (edge,) = compile(place.folder / "p.rlg").reshards
    first, *later = [line["reshard_bytes"] for line in metrics(folder) if "iteration" in line]
    assert edge.first_buckets and later == [edge.received_bytes_per_device] * len(later) and first > later[0]


def test_frozen_weights_stay_and_are_sent_once_and_a_resumed_run_goes_on_as_the_whole_one(place):
    place.write(KEPT, SAVED, evaluated=False)
    ran(place, *SMALL, "--iterations", "4", "--out", "whole")
    begun = weights(EXAMPLE, "model")
    kept = {name for name in begun if name.startswith(BOTTOM)}
    assert changed(begun, weights(place.folder / "whole")) == begun.keys() - kept and len(kept) == 13
    assert_sent_once(place, place.folder / "whole")
    ran(place, *SMALL, "--iterations", "2", "--out", "half")
    ran(place, *SMALL, "--iterations", "4", "--resume", "half", "--out", "half")
    assert not changed(weights(place.folder / "whole"), weights(place.folder / "half"))
    times = ("seconds", "tokens_per_second", "throughput_eq5", "phases", "dock_bytes", "dock_messages", "imbalance")
    times = (*times, "reshard_bytes", "changed")  # a resumed run sends frozen weights again
    one, other = (
        [{key: value for key, value in line.items() if key not in times} for line in metrics(place.folder / name)]
        for name in ("whole", "half")
    )
    assert one == other


def test_a_resumed_run_may_freeze_what_was_trained(place):
    """It keeps the weights of the checkpoint, not those of the model's folder, and so do the ranks that generate."""
    place.write(SAVED, evaluated=False)
    ran(place, *SMALL, "--iterations", "2", "--out", "out")
    trained = weights(place.folder / "out")
    place.write(KEPT, SAVED, evaluated=False)
    ran(place, *SMALL, "--iterations", "5", "--resume", "out", "--out", "out")
    after = weights(place.folder / "out")
    assert {name for name in after if name.startswith(BOTTOM)} == after.keys() - changed(trained, after)
    assert changed(weights(EXAMPLE, "model"), after) == after.keys()


def test_a_resumed_run_may_train_what_was_frozen(place):
    place.write(KEPT, SAVED, evaluated=False)
    ran(place, *SMALL, "--iterations", "2", "--out", "out")
    place.write(SAVED, evaluated=False)
    ran(place, *SMALL, "--iterations", "4", "--resume", "out", "--out", "out")
    assert changed(weights(EXAMPLE, "model"), weights(place.folder / "out")) == weights(EXAMPLE, "model").keys()


@pytest.mark.parametrize("lead", [[], [stale(1)]], ids=["in step", "ahead"])
def test_between_two_pools(place, lead):
    place.write(*APART, *lead, KEPT, evaluated=False)
    ran(place, *SMALL, "--iterations", "4", "--out", "out")
    begun = weights(EXAMPLE, "model")
    assert changed(begun, weights(place.folder / "out")) == {name for name in begun if not name.startswith(BOTTOM)}
    assert_sent_once(place, place.folder / "out")
