"""The dock: any order of arrival, each unit once, the same mini-batches, and words for what is missing."""

import tempfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from dock_readers import READS, reader
from hypothesis import given
from hypothesis import strategies as st
from sample import examples

from msrl_graph.runtime.data.columns import ColumnData, ColumnRows, Verdicts, concatenate, ragged, texts
from msrl_graph.runtime.dock.client import _find_rows as found_here
from msrl_graph.runtime.dock.client import assemble_batch, list_wanted_rows
from msrl_graph.runtime.dock.controller import Controller
from msrl_graph.runtime.dock.messages import RowLocation, RowsReady
from msrl_graph.runtime.dock.readers import ColumnRead
from msrl_graph.runtime.dock.segments import Room, Segments
from msrl_graph.runtime.dock.warehouse import Warehouse
from msrl_graph.runtime.process.task import Task


def opened(r, prompts, iteration=0):
    controller = Controller(r)
    task = Task("train", iteration, prompts)
    for round in controller.open(task):
        controller.hand_out(task.key, round)
    return controller, task.key


def arrivals(prompts, fan, random, warehouses=1):
    """Every cell of every column, in a random order, each in a random warehouse; some are written there again."""
    cells = [(r.column, row) for r in READS for row in range(prompts * (fan if r.rows else 1))]
    cells = [(c, row, random.randrange(warehouses)) for c, row in cells]
    cells += random.sample(cells, len(cells) // 3)
    random.shuffle(cells)
    return cells


class Taker:
    """Takes each share of a controller once."""

    def __init__(self, controller):
        self.controller = controller
        self.counts = [0] * len(controller.reader.group_warehouses)

    def all(self, key):
        found = []
        for group in range(len(self.counts)):
            for share in self.controller.decided_shares(key, group)[self.counts[group] :]:
                found.append((group, share))
                self.counts[group] += 1
        return found


def hear(controller, key, *news):
    column, rows, lengths, warehouse, *verdicts = news
    rounds = controller.take_in_news(key, [RowsReady(column, rows, lengths, RowLocation(warehouse, "some"), *verdicts)])
    for round in rounds:
        controller.hand_out(key, round)
    return rounds


def play(r, prompts, fan, random, warehouses=1, iteration=0):
    controller, key = opened(r, prompts, iteration)
    found = []
    taker = Taker(controller)
    for column, row, warehouse in arrivals(prompts, fan, random, warehouses):
        hear(controller, key, column, np.array([row]), np.array([row % 5 + 1]), warehouse)
        found += taker.all(key)
    return controller, found


sizes = st.tuples(st.integers(1, 6), st.integers(1, 4))
shape = {
    "sizes": sizes,
    "groups": st.integers(1, 4),
    "cut": st.fixed_dictionaries({"chunk": st.integers(0, 7), "chunk_tokens": st.sampled_from([0, 0, 1, 4, 9, 100])}),
    "random": st.randoms(use_true_random=False),
}


@given(**shape, unit=st.sampled_from([0, 1]), balance=st.booleans())
@examples(200)
def test_every_unit_is_handed_out_once_in_any_order_of_arrival(sizes, groups, cut, random, unit, balance):
    prompts, fan = sizes
    controller, found = play(
        reader(fan, groups=groups, **cut, unit=unit, balance=balance),
        prompts,
        fan,
        random,
        3,
    )
    units = np.concatenate([s.units for _, s in found])
    assert sorted(units) == list(range(prompts * (fan if unit else 1)))
    for group in range(groups):
        mine = [s for g, s in found if g == group]
        assert [s.last for s in mine] == [False] * (len(mine) - 1) + [True]
        assert len(mine) == len(found) // groups  # each round gives every group a share, if an empty one
    assert controller.describe_missing_rows("train/0") == "nothing: all its rows are there"


@given(**shape)
@examples(100)
def test_a_share_is_not_handed_out_before_its_rows_are_there(sizes, groups, cut, random):
    prompts, fan = sizes
    r = reader(fan, groups=groups, **cut)
    controller, key = opened(r, prompts)
    there = set()
    taker = Taker(controller)
    for column, row, _ in arrivals(prompts, fan, random):
        there.add((column, row))
        hear(controller, key, column, np.array([row]), np.array([1]), 0)
        for _, share in taker.all(key):
            for r in READS:
                assert all((r.column, x if r.rows else x // fan) in there for x in share.rows)


@given(**shape)
@examples(100)
def test_a_share_by_tokens_is_as_small_as_may_be(sizes, groups, cut, random):
    """Of rows that come one by one, so many tokens or units make a round, but for the last."""
    prompts, fan = sizes
    r = reader(fan, groups=groups, **cut)
    _, found = play(r, prompts, fan, random)
    of_round = {}
    for group in range(groups):
        for i, share in enumerate(s for g, s in found if g == group):
            of_round.setdefault(i, []).extend(share.rows)
    rounds = [[row % 5 + 1 for row in sorted(rows)] for rows in of_round.values()]
    for lengths in rounds[:-1] if cut["chunk"] or cut["chunk_tokens"] else ():
        assert len(lengths) == cut["chunk"] or sum(lengths) >= cut["chunk_tokens"] > 0
    for lengths in rounds:
        assert not 0 < cut["chunk_tokens"] <= sum(lengths) - max(lengths, default=0)
        assert not 0 < cut["chunk"] < len(lengths)


@given(**shape, mini=st.integers(0, 9), epochs=st.integers(1, 3), iteration=st.integers(0, 5))
@examples(150)
def test_mini_batches_depend_on_seed_iteration_and_row_only(sizes, groups, cut, random, mini, epochs, iteration):
    prompts, fan = sizes

    def batches(number_of_groups, r):
        _, found = play(
            reader(fan, groups=number_of_groups, update=True, mini_batch=mini, epochs=epochs),
            prompts,
            fan,
            r,
            2,
            iteration=iteration,
        )
        rounds = {}
        for group in range(number_of_groups):
            for i, share in enumerate(s for g, s in found if g == group):
                rounds.setdefault((share.epoch, i), []).extend(share.units)
        return {k: sorted(v) for k, v in rounds.items()}

    one = batches(1, random)
    assert one == batches(groups, random)
    for epoch in range(epochs):
        rows = [u for (e, _), units in one.items() for u in units if e == epoch]
        assert sorted(rows) == list(range(prompts * fan))
    assert all(len(units) <= (mini or prompts * fan) for units in one.values())


@given(**shape, update=st.booleans(), balance=st.booleans(), data=st.data())
@examples(200)
def test_a_controller_that_died_is_rebuilt_from_the_warehouses(sizes, groups, cut, random, update, balance, data):
    prompts, fan = sizes
    r = reader(
        fan,
        groups=groups,
        **cut,
        update=update,
        mini_batch=cut["chunk"],
        epochs=2 if update else 1,
        balance=balance,
    )
    with segments() as one, segments() as other:
        warehouses = [Warehouse(i, files) for i, files in enumerate((one, other))]
        _rebuilt(r, prompts, fan, random, data, warehouses)


def _rebuilt(r, prompts, fan, random, data, warehouses):
    groups = len(r.group_warehouses)
    update = r.update
    controller, key = opened(r, prompts, 4)
    taker = Taker(controller)
    found = []
    news = []
    cells = arrivals(prompts, fan, random, 2)
    death = data.draw(st.integers(0, len(cells)), label="death")
    lost = data.draw(st.booleans(), label="lost: it dies between hearing and handing")
    for at, (column, row, w) in enumerate([*cells, cells[0]]):
        if at == death:
            heir = Controller(r)
            known = [w.known(Task("train", 4, prompts)) for w in warehouses]
            rounds = known[0].rounds.get("n", [])
            for round in heir.restore(known[0].task, [n for k in known for n in k.news], rounds):
                if heir.keeps:
                    warehouses[0].keep(key, "n", [round])
                heir.hand_out(key, round)
            # Who asks again for what it was given gets the same rows, from where they lie now.
            for group in range(groups):
                for index in range(taker.counts[group]):
                    old, new = (c.decided_shares(key, group)[index] for c in (controller, heir))
                    assert list(old.units) == list(new.units) and (old.largest_share_rows, old.last, old.elements) == (
                        new.largest_share_rows,
                        new.last,
                        new.elements,
                    )
            taker.controller = controller = heir
        lengths = [row % 5 + 1]
        piece = ColumnRows(np.array([row]), ragged([np.zeros(lengths[0])], np.int32))
        warehouses[w].segments.write(key, str(at), "n", {column: piece})
        rounds = controller.take_in_news(key, warehouses[w].put(key, str(at)))
        if lost and at + 1 == death:
            continue
        for round in rounds:
            if controller.keeps:  # what else was decided, the heir decides again
                warehouses[0].keep(key, "n", [round])
            controller.hand_out(key, round)
        news += rounds
        found += taker.all(key)
    found += taker.all(key)
    assert sorted(np.concatenate([s.units for _, s in found])) == sorted(
        list(range(prompts * fan)) * (2 if update else 1)
    )


def test_another_iteration_or_epoch_cuts_other_mini_batches():
    import random

    def first(iteration):
        _, found = play(
            reader(4, groups=1, update=True, mini_batch=8, epochs=2), 8, 4, random.Random(0), iteration=iteration
        )
        return [tuple(s.units) for _, s in found]

    a = first(0)
    b = first(1)
    assert a[0] != b[0] and a[0] != a[4]


@pytest.mark.parametrize("epochs", [1, 2])
def test_the_last_mini_batch_of_an_epoch_has_the_rest(epochs):
    """Which `mini_batch` says in its own documentation."""
    import random

    _, found = play(reader(4, groups=1, update=True, mini_batch=12, epochs=epochs), 8, 4, random.Random(0))
    assert [len(s.units) for _, s in found] == [12, 12, 8] * epochs
    for epoch in range(epochs):
        rows = np.concatenate([s.units for _, s in found[3 * epoch : 3 * epoch + 3]])
        assert sorted(rows.tolist()) == list(range(32))


def test_a_whole_batch_is_one_unit_for_one_group():
    import random

    _, found = play(reader(2, whole_batch=True, groups=2), 3, 2, random.Random(1))
    assert sorted(len(s.units) for _, s in found) == [0, 1]
    share = next(s for _, s in found if len(s.units))
    assert {c: len(w) for c, w in share.where.items()} == {"prompt": 3, "response": 6, "reward": 6}


@pytest.mark.parametrize("dies", [False, True])
def test_who_reads_nothing_but_a_state_is_handed_its_rows_as_the_iteration_begins(dies):
    for chunk in (0, 2):
        controller, key = opened(
            reader(reads=(), rows=0, unit=0, whole_batch=chunk == 0, chunk=chunk, prompts="prompt"), 3
        )
        if dies:
            controller = Controller(controller.reader)
            for round in controller.restore(Task("train", 0, 3), [], []):
                controller.hand_out(key, round)
        shares = [s for _, s in Taker(controller).all(key)]
        assert sorted(np.concatenate([s.rows for s in shares])) == [0, 1, 2]
        assert (
            sum(s.last for s in shares) == 2
            and controller.describe_missing_rows(key) == "nothing: all its rows are there"
        )


def test_what_is_missing_is_named():
    controller, key = opened(reader(), 2)
    hear(controller, key, "prompt", np.arange(2), np.ones(2), 0)
    hear(controller, key, "reward", np.arange(7), np.ones(7), 0)
    assert controller.describe_missing_rows(key) == (
        "`response` from `actor.generate` (8 of 8 rows missing: 0, 1, 2, 3, 4, ...); `reward` from `host.reward` "
        "(1 of 8 rows missing: 7)"
    )


rows = st.lists(st.lists(st.integers(0, 9), max_size=5), min_size=1, max_size=12)


@contextmanager
def segments():
    """Of a room that holds nobody up."""
    with tempfile.TemporaryDirectory() as folder:
        yield Segments(Room(Path(folder)))


def written(warehouse, name, pieces):
    warehouse.segments.write("k/0", name, "writer", pieces)
    return warehouse.put("k/0", name)


@given(rows, st.randoms(use_true_random=False))
def test_a_warehouse_gives_back_what_it_was_given(values, random):
    with segments() as files:
        _gives_back(Warehouse(0, files), values, random)


def _gives_back(warehouse, values, random):
    order = list(range(len(values)))
    at = {}
    names = iter("abc")
    random.shuffle(order)
    cut = random.randint(0, len(order))
    for part in (order[:cut], order[cut:], order[:1]):  # the first row is written twice
        if part:
            column = ragged([np.array(values[i]) for i in part], np.int32)
            name = next(names)
            scalars = ColumnData(np.array(part, np.float32))
            written(
                warehouse, name, {"c": ColumnRows(np.array(part), column), "s": ColumnRows(np.array(part), scalars)}
            )
            at |= dict.fromkeys(part, name)
    asked = np.array(random.sample(range(len(values)), random.randint(1, len(values))))
    for name in set(at.values()):
        mine = np.array([i for i in asked if at[i] == name], int)
        got = warehouse.get("k/0", {name: {"c": mine, "s": mine}})[name]
        assert [list(got["c"][i]) for i in range(len(mine))] == [values[i] for i in mine]
        assert list(got["s"].values) == list(mine)
    whole = warehouse.whole("k/0")
    assert [list(whole["c"].column[i]) for i in range(len(values))] == values
    warehouse.drop("k/0")
    assert warehouse.whole("k/0") == {} and not [*warehouse.segments.tasks()]


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), min_size=1, max_size=6), min_size=1, max_size=4)
)
def test_verdicts_stay_verdicts_in_a_warehouse_and_on_the_way(parts):
    """Controllers hear how often each row goes on, not how long it is; of a row that was written twice the later
    verdict counts."""
    with segments() as files:
        _stay_verdicts(files, parts)


def _stay_verdicts(files, parts):
    warehouse = Warehouse(3, files)
    times = {}
    for i, part in enumerate(parts):
        rows, verdicts = (np.array(x) for x in zip(*part, strict=True))
        written(warehouse, str(i), {"n.times": Verdicts(rows, ColumnData(verdicts.astype(np.int32)))})
        times |= dict(part)
    known = warehouse.known(Task("k", 0, 3))
    whole = warehouse.whole("k/0")["n.times"]
    told = [
        (n.column, n.place, n.verdicts, row, times)
        for n in known.news
        for row, times in zip(n.rows, n.lengths, strict=True)
    ]
    expected = [(RowLocation(3, str(i)), sorted(dict(part).items())) for i, part in enumerate(parts)]
    assert told == [("n.times", place, True, row, times) for place, part in expected for row, times in part]
    assert (
        isinstance(whole, Verdicts)
        and dict(zip(whole.rows, whole.reported_values, strict=True)) == times
        and list(whole.rows) == sorted(times)
    )
    plain = RowsReady.from_piece(
        "reward", ColumnRows(np.arange(2), ColumnData(np.array([5.0, 7.0]))), RowLocation(0, "some")
    )
    assert not plain.verdicts and list(plain.lengths) == [1, 1]


def test_columns_of_prompts_are_laid_out_by_response():
    r = reader(2, reads=(ColumnRead("prompt", 0, "source"), ColumnRead("response", 1, "g")), groups=1)
    controller, key = opened(r, 3)
    hear(controller, key, "prompt", np.arange(3), np.ones(3), 0)
    hear(controller, key, "response", np.arange(6), np.ones(6), 0)
    share = controller.decided_shares(key, 0)[0]
    fetched = {"prompt": texts(["a", "bé", ""]), "response": texts(list("uvwxyz"))}
    numbers = r.numbers(Task("train", 0, 3))
    batch = assemble_batch(share, r, numbers, list_wanted_rows(share, r, numbers), fetched)
    assert [batch.columns["prompt"].text(i) for i in range(6)] == ["a", "a", "bé", "bé", "", ""]
    assert list(batch.rows) == [0, 1, 2, 3, 4, 5]


@given(st.lists(rows, min_size=1, max_size=4))
def test_concatenation_keeps_rows(parts):
    column = concatenate([ragged([np.array(r) for r in p], np.int64) for p in parts])
    assert [list(column[i]) for i in range(len(column))] == [r for p in parts for r in p]


@given(
    st.lists(st.permutations(range(8)).map(lambda p: p[:4]), max_size=3), st.permutations(range(8)).map(lambda p: p[:3])
)
def test_rows_that_a_process_has_are_found_in_the_order_asked_for(parts, asked):
    written = [ColumnRows(np.array(rows), ragged([np.full(r % 3 + 1, r) for r in rows], np.int32)) for rows in parts]
    found = found_here(np.array(asked), written)
    assert (found is not None) == any(set(asked) <= set(rows) for rows in parts)
    if found is not None:
        assert [list(found[i]) for i in range(len(found))] == [[r] * (r % 3 + 1) for r in asked]
    assert found_here(np.array([], int), written) is None
