"""The light engines train on divided sequences and experts, and a row at a time, as on one rank with rows packed: whole
runs that replay a recorded one."""

import pytest
from place import metrics, rows_of
from replays import How, hold, recorded

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
TWO = {"generate": "dp = 2", "devices": 2}
HOWS = {
    "cp 2, a ring": How("cp = 2", **TWO),
    "cp 2, Ulysses": How("cp = 2, cp_kind = ulysses", **TWO),
    "a row a micro-batch, beside packed ones": How(trainer="fsdp { micro_batch = 1 }"),
}


@pytest.fixture(scope="module")
def wanted(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("recorded") / "one")


# Those that are long have twins: the ring here, and Ulysses and micro-batches on ranks in
# tests/scenarios/training/test_ranks.py.
@pytest.mark.parametrize("name", [n if "ring" in n else pytest.param(n, marks=pytest.mark.long) for n in HOWS])
def test_a_replay_computes_the_numbers_of_the_recorded_run(name, wanted, tmp_path):
    hold(name, HOWS[name], wanted, tmp_path)


def test_the_rows_that_it_packs_differ_in_length(wanted):
    lengths = {len(row) for i, _ in enumerate(metrics(wanted)) for row in rows_of(wanted, i)["response"].to_pylist()}
    assert len(lengths) > 2


@pytest.mark.long
def test_a_replay_of_a_mixture_with_divided_experts_does_too(tmp_path):
    wanted = recorded(tmp_path / "one", "mixture")
    hold("ep 2", How("dp = 2, ep = 2", **TWO), wanted, tmp_path, "mixture")
