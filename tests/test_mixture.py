"""A mixture of experts from end to end: the example's program trains a small one."""

import pytest
from mixture import mixture
from place import MINE, ONE_RANK, THRICE, TRAINED, Place, assert_alike, weights


def run(folder, *changes):
    """The folder of a run of three iterations, whose rewards have something to learn from."""
    folder.mkdir()
    place = Place(folder)
    (folder / "model").unlink()
    mixture(folder / "model")
    place.function("return float(sum(map(ord, response)) % 3)")
    place.write(MINE, *changes, *TRAINED, evaluated=False)
    code, _, err = place.run("p.rlg", *THRICE, "--out", "out")
    assert code == 0, err
    place.assert_clean()
    return folder / "out"


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return run(tmp_path_factory.mktemp("mixture") / "alone", *ONE_RANK)


@pytest.mark.slow
def test_it_trains_alike_with_experts_on_other_ranks(alone, tmp_path):
    found = run(
        tmp_path / "run",
        ("dp = 2, zero = 3", "dp = 2, ep = 2"),
        ("layout actor.generate { tp = 2 }", "layout actor.generate { dp = 2 }"),
    )
    assert_alike(alone, found)


@pytest.mark.slow
def test_what_it_saves_is_read_by_transformers(alone):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(alone / "weights" / "actor")
    saved = weights(alone)
    first = model.model.layers[0].mlp.experts.gate_up_proj[3].detach().numpy()
    assert (first[:32] == saved["model.layers.0.mlp.experts.3.gate_proj.weight"]).all()
    assert (first[32:] == saved["model.layers.0.mlp.experts.3.up_proj.weight"]).all()
