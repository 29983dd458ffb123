"""The example's program with router replay, and runs of it on a mixture."""

from place import SMALL, Place, metrics

# Routers stay as they are, so that their scores stay tied.
TIED = ("worker actor     : policy\n", 'worker actor     : policy { freeze = ["*.mlp.gate.*"] }\n')


def declared(layers, experts):
    """A change of the program that declares columns of routes, for prompts and responses."""
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


def run(folder, made, *changes, iterations=2, seed=0):
    """Trains the model that `made` makes, by rewards that all responses differ in; returns its metrics and folder."""
    folder.mkdir()
    place = Place(folder)
    (folder / "model").unlink()
    made(folder / "model")
    place.function("return float(sum(map(ord, response)) % 3)")
    place.write(("exact_match()", '"mine.py:score"'), *changes, evaluated=False)
    options = ("--iterations", str(iterations), "--seed", str(seed))
    code, _, err = place.run("p.rlg", *SMALL, *options, "--out", "out")
    assert code == 0, err
    place.assert_clean()
    return [line for line in metrics(folder / "out") if "iteration" in line], folder / "out"
