"""Runs that start from the folder of an adapter, which another run or PEFT wrote."""

import shutil

import numpy as np
import pytest
import torch
from place import SMALL, metrics, ran, rows_of
from stale_runs import APART, stale

pytestmark = pytest.mark.slow
WORKER = "worker actor     : policy"
ADAPTER = (WORKER, f"{WORKER} {{ adapter = lora(rank = 4, targets = [q_proj, down_proj]) }}")
LEARNS = [("lr = 2e-4", "lr = 1e-2"), ("warmup = 20", "warmup = 1"), ("every = 40", "every = 2")]
COPIES = [("layout actor.generate { tp = 2 }", "layout actor.generate { dp = 2 }")]
MODEL = 'model policy  = "./model"'
FROM = (MODEL, 'model policy  = "./first/weights/actor"')
TWICE = [*SMALL, "--iterations", "2", "--record"]


def evaluated(folder, after):
    """The rows of the evaluation after so many iterations."""
    return rows_of(folder, after, "../evaluation_rows/held_out")


def peft_logps(adapter, rows):
    """The log-probabilities of the responses, as PEFT computes them with the adapter in a folder."""
    from peft import AutoPeftModelForCausalLM

    net = AutoPeftModelForCausalLM.from_pretrained(adapter)
    for row in rows.to_pylist():
        ids = torch.tensor([*row["prompt"], *row["response"]])
        with torch.no_grad():
            logps = net(ids[None]).logits[0, :-1].log_softmax(-1)
        yield logps.gather(1, ids[1:, None])[len(row["prompt"]) - 1 :, 0].numpy()


def test_a_run_starts_where_the_adapter_s_own_run_ended(place):
    """Its evaluation is the same bit for bit, and its frozen reference has the same adapter."""
    place.write(*LEARNS, ADAPTER)
    ran(place, *TWICE, "--out", "first")
    place.write(*LEARNS, FROM)
    ran(place, *TWICE, "--out", "second")
    first, second = (place.folder / name for name in ("first", "second"))
    assert evaluated(second, 0).equals(evaluated(first, 2))
    assert not evaluated(second, 0).equals(evaluated(first, 0))
    kl = [line["loss/kl"] for line in metrics(second) if "iteration" in line]
    assert kl[0] == 0 < kl[1]
    rows = rows_of(second, 0)
    assert rows["old_logp"].equals(rows["ref_logp"])
    for row, wanted in zip(rows.to_pylist(), peft_logps(first / "weights" / "actor", rows), strict=True):
        assert np.abs(np.array(row["old_logp"]) - wanted).max() < 1e-5

    # The run's own results can be its adapter, which is then not removed.
    code, _, err = place.run("p.rlg", *TWICE, "--out", "first", "--overwrite")
    assert code == 1 and "first/weights, which the run reads" in err.replace("/actor", ""), err


def test_a_frozen_worker_generates_with_the_model_and_the_adapter(place):
    """Whether the weights come from its folder, or from the trainer."""
    place.write(*LEARNS, ADAPTER)
    ran(place, *TWICE, "--out", "first")
    names = [("worker actor     : policy", "worker actor : policy { model = base }\n  worker drawer : policy frozen")]
    names += [("actor.generate", "drawer.generate"), ("actor.update => drawer.generate", "")]
    names += [("clip(0.2)", "clip(0.2)"), ("model policy", 'model base = "./model"\n  model policy')]
    text = place.write(*LEARNS, FROM, *names, evaluated=False)
    assert "drawer.generate(prompt)" in text
    ran(place, *TWICE, "--out", "second")
    rows = rows_of(place.folder / "second", 0)
    wanted_logps = peft_logps(place.folder / "first" / "weights" / "actor", rows)
    for row, wanted in zip(rows.to_pylist(), wanted_logps, strict=True):
        assert np.abs(np.array(row["response_logp"]) - wanted).max() < 1e-5


def test_a_resumed_run_needs_the_adapter_that_it_began_with(place):
    """Its two generating ranks share a copy of the model's weights."""
    place.write(*COPIES, *LEARNS, ADAPTER, evaluated=False)
    ran(place, *TWICE, "--out", "first")
    place.write(*COPIES, *LEARNS, FROM, ("seed = 0 }", "seed = 0, save = 1 }"), evaluated=False)
    ran(place, *TWICE, "--out", "whole")
    ran(place, *SMALL, "--iterations", "1", "--out", "half")
    ran(place, *SMALL, "--iterations", "2", "--resume", "half", "--out", "half")
    name = "weights/actor/adapter_model.safetensors"
    assert (place.folder / "whole" / name).read_bytes() == (place.folder / "half" / name).read_bytes()
    shutil.copy(place.folder / "whole" / name, place.folder / "first" / name)
    code, _, err = place.run("p.rlg", *SMALL, "--iterations", "3", "--resume", "half", "--out", "half")
    assert code == 1 and "adapter policy: adapter_model.safetensors has other content" in err, err


def test_ranks_of_a_pool_of_their_own_share_a_copy_too(place):
    """They fetch the adapter when they need it, and generate what one rank generates."""
    two = [(old, new.replace("{ dp = 1 }\n", "{ dp = 2 }\n")) for old, new in APART]
    for name, changes in {"one": APART, "two": [("devices_per_node = 2", "devices_per_node = 3"), *two]}.items():
        place.write(*changes, *LEARNS, stale(1), ADAPTER, evaluated=False)
        ran(place, *SMALL, "--iterations", "3", "--record", "--out", name)
    for iteration in range(3):
        one, other = (rows_of(place.folder / name, iteration) for name in ("one", "two"))
        assert one["response"].equals(other["response"])
        logps = [np.concatenate(rows["gen_logp"].to_pylist()) for rows in (one, other)]
        assert np.abs(logps[0] - logps[1]).max() < 1e-4
