"""Runs that train an adapter: it alone is sent and saved, and the generation computes with it."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from patched import patched
from place import EXAMPLE, ONE_RANK, SMALL, metrics, ran, weights
from safetensors.numpy import load_file
from stale_runs import APART, stale

from msrl_graph import compile, export

pytestmark = pytest.mark.slow
WORKER = "worker actor     : policy"
ADAPTER = (WORKER, f"{WORKER} {{ adapter = lora(rank = 4, targets = [q_proj, down_proj]) }}")
SAVED = ("seed = 0 }", "seed = 0, save = 2 }")
# Files of the run that do not depend on the time at which it ran.
TIMES = ("seconds", "tokens_per_second", "throughput_eq5", "phases", "dock_bytes", "dock_messages", "imbalance")
TIMES = (*TIMES, "reshard_bytes", "changed")  # a resumed run sends frozen weights again
# From the second version on, the adapter arrives and is not merged.
NOT_BOUND = """
merge, count = module.AdapterMerge.merge, 0

def broken(self, weights):
    global count
    count += 1
    if count == 1:
        merge(self, weights)

module.AdapterMerge.merge = broken
"""


def adapter(folder):
    return load_file(folder / "weights" / "actor" / "adapter_model.safetensors")


def logits(model):
    with torch.no_grad():
        return model(torch.arange(2, 14)[None]).logits


def assert_adapter_sent_alone(place, folder):
    """From the second iteration on, what ranks receive is what is planned for the adapter."""
    plan = compile(place.folder / "p.rlg")
    (edge,) = plan.reshards
    first, *later = [line["reshard_bytes"] for line in metrics(folder) if "iteration" in line]
    assert later == [edge.received_bytes_per_device] * len(later)
    adapted = plan.model("actor.update")
    assert edge.received_bytes_per_device <= 4 * sum(tensor.elements for tensor in adapted.trained) < first


def test_a_resumed_run_goes_on_as_the_whole_one_and_its_folders_are_those_of_peft_and_transformers(place):
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    place.write(ADAPTER, SAVED, evaluated=False)
    ran(place, *SMALL, "--iterations", "4", "--out", "whole")
    assert_adapter_sent_alone(place, place.folder / "whole")
    ran(place, *SMALL, "--iterations", "2", "--out", "half")
    ran(place, *SMALL, "--iterations", "4", "--resume", "half", "--out", "half")
    one, other = (
        [{key: value for key, value in line.items() if key not in TIMES} for line in metrics(place.folder / name)]
        for name in ("whole", "half")
    )
    assert one == other
    whole = adapter(place.folder / "whole")
    assert len(whole) == 16 and all(value.any() for value in whole.values())
    assert all(np.array_equal(value, whole[name]) for name, value in adapter(place.folder / "half").items())

    checkpoint = place.folder / "half"
    alone = export(checkpoint, place.folder / "alone")["actor"]
    assert (alone / "adapter_model.safetensors").read_bytes() == (
        checkpoint / "weights" / "actor" / "adapter_model.safetensors"
    ).read_bytes()
    merged = export(checkpoint, place.folder / "merged", merged=True)["actor"]
    begun = weights(EXAMPLE, "model")
    after = weights(merged.parent, "actor")
    changed = {name for name, value in begun.items() if not np.array_equal(value, after[name])}
    assert changed == {name for name in begun if "q_proj.weight" in name or "down_proj.weight" in name}
    theirs = logits(AutoPeftModelForCausalLM.from_pretrained(alone))
    ours = logits(AutoModelForCausalLM.from_pretrained(merged))
    untrained = logits(AutoModelForCausalLM.from_pretrained(EXAMPLE / "model"))
    rounding, trained = (float((ours - others).abs().max()) for others in (theirs, untrained))
    assert rounding < 1e-5 and trained > 1e-4


def test_one_rank_trains_the_same_adapter(place):
    place.write(ADAPTER, evaluated=False)
    ran(place, *SMALL, "--iterations", "3", "--out", "two")
    place.write(*ONE_RANK, ADAPTER, evaluated=False)
    ran(place, *SMALL, "--iterations", "3", "--out", "one")
    one, two = (adapter(place.folder / name) for name in ("one", "two"))
    for name, value in one.items():
        assert np.abs(value - two[name]).max() < 1e-5, name


def test_so_it_does_with_dropout_whatever_the_size_of_micro_batches_and_a_resumed_run_too(place):
    dropped = (ADAPTER[0], ADAPTER[1].replace("down_proj]", "down_proj], dropout = 0.3"))
    steps = ("mini_batch = 256", "mini_batch = 12, epochs = 2")
    place.write(dropped, SAVED, steps, evaluated=False)
    ran(place, *SMALL, "--iterations", "4", "--out", "two")
    ran(place, *SMALL, "--iterations", "2", "--out", "half")
    ran(place, *SMALL, "--iterations", "4", "--resume", "half", "--out", "half")
    small = ("run {", "engine actor.update = fsdp { micro_batch = 3 }\n  run {")
    place.write(*ONE_RANK, dropped, steps, small, evaluated=False)
    ran(place, *SMALL, "--iterations", "4", "--out", "one")
    place.write(*ONE_RANK, ADAPTER, steps, evaluated=False)
    ran(place, *SMALL, "--iterations", "4", "--out", "none")
    found = {name: adapter(place.folder / name) for name in ("two", "half", "one", "none")}
    for name, value in found["two"].items():
        assert np.array_equal(value, found["half"][name]), name
        assert np.abs(value - found["one"][name]).max() < 1e-5, name
    assert any(np.abs(value - found["none"][name]).max() > 1e-4 for name, value in found["two"].items())


@pytest.mark.parametrize("lead", [[], [stale(1)]], ids=["in step", "ahead"])
def test_between_two_pools(place, lead):
    place.write(*APART, *lead, ADAPTER, evaluated=False)
    ran(place, *SMALL, "--iterations", "4", "--out", "out")
    assert_adapter_sent_alone(place, place.folder / "out")
    drifts = [line["logp_drift"] for line in metrics(place.folder / "out") if "logp_drift" in line]
    assert lead or max(drifts) < 1e-4  # ahead, the weights that drew a row are older


def test_a_worker_that_follows_has_the_same_adapter(place):
    frozen = ("worker reference : policy frozen", "worker reference : policy frozen { follows = actor, decay = 0.5 }")
    place.write(ADAPTER, frozen, evaluated=False)
    ran(place, *SMALL, "--iterations", "3", "--out", "out")
    own, theirs = (
        load_file(place.folder / "out" / "weights" / worker / "adapter_model.safetensors")
        for worker in ("actor", "reference")
    )
    assert own.keys() == theirs.keys()
    assert any(not np.array_equal(value, theirs[name]) for name, value in own.items())
    assert all(value.any() for name, value in theirs.items() if "lora_B" in name)


def test_an_adapter_that_is_not_bound_ends_the_run_in_its_iteration(place):
    place.write(*ONE_RANK, ADAPTER, evaluated=False)
    variables = patched(place, "msrl_graph.runtime.weights.adapter_merge", NOT_BOUND)
    code, _, err = place.run("p.rlg", *SMALL, "--iterations", "5", "--out", "out", **variables)
    assert code == 3
    assert "the weights that it generates with are those of version" in err and "is not bound to the model" in err, err
    assert len(metrics(place.folder / "out")) <= 2


def test_adapter_config_names_what_peft_needs(place):
    place.write(*ONE_RANK, ADAPTER, evaluated=False)
    ran(place, *SMALL, "--iterations", "1", "--out", "out")
    config = json.loads((place.folder / "out" / "weights" / "actor" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (4, 8, ["q_proj", "down_proj"])
    assert Path(config["base_model_name_or_path"]).samefile(place.folder / "model")


def test_a_reference_that_is_the_base_has_no_weights_of_its_own_and_computes_the_same(place):
    """Unless the program states something about its placement."""
    found = {}
    for name, stated in {"shared": (), "own": [("run {", "engine reference.infer = fsdp\n  run {")]}.items():
        place.write(*stated, ADAPTER, evaluated=False)
        plan = compile(place.folder / "p.rlg")
        memory = {item for entry in plan.memory for item in entry.items}
        assert ("reference.infer weights" in memory) == (name == "own")
        ran(place, *SMALL, "--iterations", "3", "--out", name)
        found[name] = [
            {key: line[key] for key in ("loss", "loss/kl", "grad_norm")} for line in metrics(place.folder / name)
        ]
    assert found["shared"] == found["own"] and found["shared"][-1]["loss/kl"] > 0
