"""Objects that ranks give each other: whole, and none that somebody else has made."""

import os
import pickle

import numpy as np
import pytest
import ranks
import torch
from torch import distributed as dist

from msrl_graph.runtime.process.task_report import RunError
from msrl_graph.runtime.rank import object_collectives


def everyone(rank, folder):
    object_collectives.seal_with(b"of this run")
    value = {"rank": rank, "rows": np.arange(1000 * rank), "weights": torch.full((3,), float(rank))}
    same = object_collectives.broadcast(value if rank == 1 else None, dist.group.WORLD, 1)
    assert same["rank"] == 1 and len(same["rows"]) == 1000 and (same["weights"] == 1).all()
    assert [(v["rank"], len(v["rows"])) for v in object_collectives.all_gather(value)] == [(0, 0), (1, 1000)]
    found = object_collectives.gather(value)
    assert (found is None) == (rank == 1)
    if found:
        assert [float(v["weights"].sum()) for v in found] == [0.0, 3.0]


def test_ranks_share_objects():
    ranks.run(2, everyone)


def strange(rank, folder):
    """Rank 1 has the token of another run, and so rank 0 unpickles nothing of it, whichever way it comes."""
    object_collectives.seal_with(b"of another run" if rank else b"of this run")
    bomb = Bomb(folder / "harm")
    for shared in (
        object_collectives.gather,
        object_collectives.all_gather,
        lambda value: object_collectives.broadcast(value, dist.group.WORLD, 1),
    ):
        if rank == 0 or shared is object_collectives.all_gather:
            with pytest.raises(RunError, match="no rank of this run sent"):
                shared(None if rank == 0 else bomb)
        else:
            shared(bomb)
    assert not (folder / "harm").exists()


def test_what_a_strange_rank_shares_is_not_unpickled():
    ranks.run(2, strange)


class Bomb:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (os.mkdir, (self.path,))


def test_what_no_rank_of_the_run_has_made_is_not_unpickled(tmp_path):
    object_collectives.seal_with(b"of another run")
    sealed = object_collectives.seal(Bomb(tmp_path / "harm"))
    object_collectives.seal_with(b"of this run")
    plain = torch.frombuffer(bytearray(pickle.dumps(Bomb(tmp_path / "harm"))), dtype=torch.uint8)
    changed = object_collectives.seal({"a": 1})
    changed[-2] += 1
    for false in (sealed, plain, changed, plain[:10], plain[:0]):
        with pytest.raises(RunError, match="no rank of this run sent"):
            object_collectives.unseal(false)
    assert not (tmp_path / "harm").exists()
    assert object_collectives.unseal(object_collectives.seal({"a": 1})) == {"a": 1}


def test_a_rank_without_a_token_neither_sends_nor_takes():
    """Everybody could make a digest without a secret."""
    object_collectives.seal_with(b"of this run")
    sealed = object_collectives.seal({"a": 1})
    object_collectives.seal_with(b"")
    try:
        for call in (lambda: object_collectives.seal({"a": 1}), lambda: object_collectives.unseal(sealed)):
            with pytest.raises(RunError, match="has no token"):
                call()
    finally:
        object_collectives.seal_with(b"of this run")
