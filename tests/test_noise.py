"""Random numbers are a function of their stream and key alone, look random, and streams have nothing in common."""

import itertools
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from msrl_graph import noise
from msrl_graph.noise import RandomStream

PACKAGE = Path(noise.__file__).parent
small = st.integers(0, 2**40)


@given(small, small, st.lists(small, min_size=1, max_size=50), small, st.randoms(use_true_random=False))
def test_neither_the_batch_nor_the_place_in_it_matters(seed, iteration, rows, step, random):
    keys = RandomStream(seed, "token", "actor.generate", "train").keys(iteration, np.array(rows))
    whole = noise.uniform(keys, step)
    order = list(range(len(rows)))
    random.shuffle(order)
    assert np.array_equal(whole[order], noise.uniform(keys[order], step))
    alone = RandomStream(seed, "token", "actor.generate", "train").keys(iteration, rows[0])
    assert noise.uniform(alone, step) == whole[0]


def test_each_part_of_the_key_and_its_place_matter():
    base = RandomStream(1, "token", "a").keys(2, 3, 4)
    for other in ((3, 2, 4), (2, 4, 3), (2, 3, 5), (0, 3, 4), (2, 3)):
        assert RandomStream(1, "token", "a").keys(*other) != base
    for seed, *name in (
        (2, "token", "a"),
        (1, "function", "a"),
        (1, "token", "b"),
        (1, "token"),
        (1, "token", "a", ""),
    ):
        assert RandomStream(seed, *name).keys(2, 3, 4) != base


def test_it_is_uniform_and_uncorrelated():
    u = noise.uniform(RandomStream(0, "token", "a").keys(7, np.arange(200_000)), 3)
    counts = np.histogram(u, bins=100, range=(0, 1))[0]
    chi2 = ((counts - 2000) ** 2 / 2000).sum()
    assert 50 < chi2 < 160  # 99 degrees of freedom: a thousandth lies outside either side
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.01
    streams = [
        RandomStream(0, "token", "a"),
        RandomStream(0, "token", "b"),
        RandomStream(0, "token", "a", "x"),
        RandomStream(1, "token", "a"),
    ]
    drawn = [noise.uniform(s.keys(i, np.arange(200_000)), 3) for s in streams for i in (7, 8)]
    for one, other in itertools.combinations(drawn, 2):
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.012  # five standard deviations


def test_a_generator_is_keyed():
    one = RandomStream(1, "function", "a")
    other = RandomStream(1, "function", "b")
    assert one.generator(1, 2).integers(1 << 60) == one.generator(1, 2).integers(1 << 60)
    assert len({s.generator(1, i).integers(1 << 60) for s in (one, other) for i in (2, 3)}) == 4


def test_a_stream_is_the_same_in_every_process():
    """Whatever Python's hashes are salted with, and for a version of streams: numbers of a recorded or resumed run."""
    stream = "RandomStream(7, 'token', 'actor.generate', 'train')"
    code = f"from msrl_graph.noise import RandomStream; print({stream}.keys(3, [5]))"
    told = {
        subprocess.run([sys.executable, "-c", code], env={"PYTHONHASHSEED": s}, capture_output=True, check=True).stdout
        for s in ("1", "2")
    }
    assert noise.VERSION == 2 and told == {b"[11076853597665714726]\n"}


def test_all_randomness_of_a_run_comes_from_a_named_stream():
    """Whoever needs random numbers adds a purpose to noise.py. Made-up inputs have fixed seeds instead."""
    aside = {"calibrate/measure.py", "calibrate/probes.py", "rank/loss_split_check.py"}
    loose = [
        (path.relative_to(PACKAGE).as_posix(), word)
        for folder in ("runtime", "backends", "data", "tools", "algorithms")
        for path in (PACKAGE / folder).rglob("*.py")
        for word in ("default_rng", r"random\.random", r"manual_seed\(", r"\b_keys\(", "Philox", r"random\.Random")
        if re.search(word, path.read_text(encoding="utf-8"))
        and not path.as_posix().endswith((*aside, "megatron/cpu.py"))
    ]
    assert not loose, loose
