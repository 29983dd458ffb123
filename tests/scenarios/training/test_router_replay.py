"""Router replay from end to end: routes that rounding decides are those of the generator in the trainer too."""

import json

import pytest
from mixture import mixture, tied
from place import ONE_RANK, THRICE, TRAINED, Place, assert_alike

from msrl_graph import compile
from msrl_graph.backends import ENGINES
from msrl_graph.compiler.unsupported import find_unsupported

# Routers stay as they are, so that their scores stay tied.
TIED = ("worker actor     : policy\n", 'worker actor     : policy { freeze = ["*.mlp.gate.*"] }\n')


def declared(layers, experts):
    """Changes of the program that declare columns of routes, for prompts and responses."""
    columns = f"    of_prompt : i16[prompt, {layers}, {experts}]\n    routing   : i16[response, {layers}, {experts}]\n"
    return ("    old_logp  : f32[response]\n", f"    old_logp  : f32[response]\n{columns}")


ROUTED = ("node actor.update(prompt, response,", "node actor.update(prompt, response, routing, of_prompt,")
BY_GENERATOR = [  # R3
    ROUTED,
    ("node actor.generate(prompt) -> response {", "node actor.generate(prompt) -> response, routing, of_prompt {"),
    ("node actor.infer(prompt, response)", "node actor.infer(prompt, response, routing, of_prompt)"),
]
BY_INFER = [  # R2
    ROUTED,
    ("infer(prompt, response) -> old_logp", "infer(prompt, response) -> old_logp, routing, of_prompt"),
]


def run(folder, made, *changes, options=("--iterations", "2")):
    """The metrics of each iteration, and the folder of the run."""
    folder.mkdir()
    place = Place(folder)
    (folder / "model").unlink()
    made(folder / "model")
    place.function("return float(sum(map(ord, response)) % 3)")
    text = place.write(*changes, evaluated=False)
    (folder / "p.rlg").write_text(text.replace("exact_match()", '"mine.py:score"'))
    code, _, err = place.run("p.rlg", *options, "--set", "prompts=16", "--set", "group=4", "--out", "out")
    assert code == 0, err
    place.assert_clean()
    lines = (folder / "out" / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "logp_drift_max" in line], folder / "out"


@pytest.mark.slow
def test_drift_is_rounding_with_replay_and_large_without(tmp_path):
    plain, _ = run(tmp_path / "plain", tied, TIED)
    replayed, _ = run(tmp_path / "replayed", tied, TIED, declared(2, 3), *BY_GENERATOR)
    without, with_replay = ([line["logp_drift"] for line in lines] for lines in (plain, replayed))
    assert min(without) > 3e-5 and max(with_replay) < 3e-6, (without, with_replay)
