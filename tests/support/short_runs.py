"""Runs of three iterations that train a small model of some family with the example's program."""

from mixture import mixture
from place import MINE, THRICE, TRAINED, Place


def run(folder, *changes, made=mixture):
    """The folder of a run of three iterations, whose rewards have something to learn from."""
    folder.mkdir()
    place = Place(folder)
    (folder / "model").unlink()
    made(folder / "model")
    place.function("return float(sum(map(ord, response)) % 3)")
    place.write(MINE, *changes, *TRAINED, evaluated=False)
    code, _, err = place.run("p.rlg", *THRICE, "--out", "out")
    assert code == 0, err
    place.assert_clean()
    return folder / "out"
