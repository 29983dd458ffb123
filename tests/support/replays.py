"""Runs that train on the responses of a recorded one, by other engines and on other layouts, and how far what they
compute is from it. Rewards are such that something is learnt; an iteration takes six optimizer steps, in two epochs,
the last mini-batch of each a short one. All is float32."""

from dataclasses import dataclass

import numpy as np
from mixture import dense, mixture
from place import MINE, SMALL, Place, metrics, ran, weights

KINDS = {"dense": dense, "mixture": mixture}
ITERATIONS = 5
BAR = 1e-4


@dataclass(frozen=True)
class How:
    """Where and by what the actor is updated and generates, in the words of a deploy."""

    update: str = "dp = 1"
    trainer: str = "fsdp"
    generate: str = "dp = 1"
    generator: str = "hf"
    devices: int = 1
    more: str = ""  # statements besides

    def changes(self):
        layouts = "dp = 2, zero = 3", "layout actor.generate { tp = 2 }"
        engines = f"engine actor.update = {self.trainer}\n  engine actor.generate = {self.generator}\n  {self.more}"
        return [
            ("devices_per_node = 2", f"devices_per_node = {self.devices}"),
            (layouts[0], self.update),
            (layouts[1], f"layout actor.generate {{ {self.generate} }}\n  {engines}"),
        ]


ALONE = How()


def run(folder, how, *arguments, kind="dense", iterations=ITERATIONS, changes=()):
    """The folder of a run of a kind of model; those of a kind begin alike."""
    folder.mkdir()
    place = Place(folder)
    place.patience = 550.0
    (folder / "model").unlink()
    KINDS[kind](folder / "model")
    place.function("return float(sum(map(ord, response)) % 3)")
    place.write(MINE, ("mini_batch = 256", "mini_batch = 12, epochs = 2"), *how.changes(), *changes, evaluated=False)
    ran(place, *SMALL, "--iterations", str(iterations), "--out", "out", *arguments)
    place.temporary.rmdir()
    return folder / "out"


def recorded(folder, kind="dense"):
    """A run by the light engines on one rank."""
    return run(folder, ALONE, "--record", kind=kind)


def deviations(found, wanted):
    """The largest relative deviations of a run from another one: of `loss` and `grad_norm` in any iteration, of a
    tensor of the `weights` at the end from its largest element, and of these from the largest step that any of them
    took, the `update`."""
    lines = list(zip(metrics(found), metrics(wanted), strict=True))
    away = {name: max(abs(a[name] / b[name] - 1) for a, b in lines) for name in ("loss", "grad_norm")}
    ours = weights(found)
    theirs = weights(wanted)
    start = weights(wanted.parent, "model")
    apart = {name: np.abs(value - theirs[name]).max() for name, value in ours.items()}
    step = max(np.abs(value - start[name]).max() for name, value in theirs.items())
    away["weights"] = max(apart[name] / np.abs(value).max() for name, value in theirs.items())
    away["update"] = max(apart.values()) / step
    return {name: float(value) for name, value in away.items()}


def hold(name, how, wanted, folder, kind="dense"):
    """Replays a recording, and fails where it computes other numbers; `-s` shows how far they are."""
    found = run(folder / "replayed", how, "--replay", str(wanted), kind=kind)
    assert [line["updates"] for line in metrics(found)] == [6] * ITERATIONS
    away = deviations(found, wanted)
    print(f"\n{name}: {', '.join(f'{what} {value:.1e}' for what, value in away.items())}")
    assert max(away[what] for what in ("loss", "grad_norm", "weights")) < BAR, away
