"""Runs in which weights do not arrive, or trainer and generator drift apart: they end in the iteration in which it
happens, with what is wrong, and no restart goes over it."""

import pytest
from patched import patched
from place import ONE_RANK, SMALL, metrics
from stale_runs import APART, stale

pytestmark = pytest.mark.slow
TENSOR = "model.layers.1.mlp.down_proj.weight"
# The third resharding brings rank 0 nothing of a tensor from its neighbour.
LEFT_OUT = f"""
run, count = module.Resharder.run, 0

def broken(self, allocate):
    global count
    count += 1
    if count == 3 and module.torch.distributed.get_rank() == 0:
        for load in (load for loads in self.loads for load in loads):
            load.receives[:] = [receive for receive in load.receives if receive.name != "{TENSOR}"]
    return run(self, allocate)

module.Resharder.run = broken
"""
# From version 2 on the copy that is fetched has an old tensor.
NOT_RENEWED = f"""
publish = module.WeightPublication.publish

def broken(self, version, told):
    if version == 2:
        self.live = [
            module.Shard(s.name, s.box, c.tensor) if s.name == "{TENSOR}" else s
            for s, c in zip(self.live, self.copies)
        ]
    return publish(self, version, told)

module.WeightPublication.publish = broken
"""


def ended(place, what, *lines, **variables):
    """A run that ends so, after so many iterations."""
    code, out, err = place.run("p.rlg", *SMALL, "--iterations", "5", "--out", "out", **variables)
    assert (code, out) == (3, ""), err
    assert err.splitlines()[-1] == f"error[run-failed]: {what}; the files of the run so far are in out", err
    assert "restarting" not in err
    assert [line["iteration"] for line in metrics(place.folder / "out")] in [[*range(n)] for n in lines]
    place.assert_clean()


def line_of(text, word):
    return text[: text.index(word)].count("\n") + 1


@pytest.mark.long
def test_a_tensor_that_is_not_sent(place):
    edge = "actor.update => actor.generate"
    line = line_of(place.write(evaluated=False), edge)
    what = f"`{edge}` (line {line} of p.rlg) on rank 0: `{TENSOR}` differs from version 2 of `actor.update`"
    variables = patched(place, "msrl_graph.runtime.weights.reshard", LEFT_OUT)
    ended(place, f"{what} (1 of 51 tensors differ)", 2, **variables)


def test_a_copy_to_fetch_that_is_not_renewed(place):
    edge = "actor.update => actor.generate"
    line = line_of(place.write(*APART, stale(1), evaluated=False), edge)
    what = f"`{edge}` (line {line} of p.rlg) on rank 0: `{TENSOR}` differs from version 2 of `actor.update`"
    variables = patched(place, "msrl_graph.runtime.weights.weight_publication", NOT_RENEWED)
    # The update may end the iteration that it is in meanwhile.
    ended(place, f"{what} and equals version 1 (1 of 51 tensors differ)", 2, 3, **variables)


def test_a_run_ends_at_a_drift_that_is_too_large(place):
    """One so small that rounding passes it."""
    text = place.write(*ONE_RANK, ("seed = 0 }", "seed = 0, max_drift = 1e-12, on_drift = stop }"), evaluated=False)
    code, _, err = place.run("p.rlg", *SMALL, "--iterations", "3", "--out", "out")
    assert code == 3, err
    (line,) = metrics(place.folder / "out")
    told = f"error[run-failed]: `actor.infer` (line {line_of(text, 'node actor.infer')} of p.rlg) in iteration 0: the "
    told += f"log-probabilities of trainer and generator differ by {line['logp_drift']:.3g} nats a token, over 1e-12: "
    assert err.splitlines()[-1].startswith(f"{told}docs/guides/training_problems.md"), err
    place.assert_clean()
