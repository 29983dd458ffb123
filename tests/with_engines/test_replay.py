"""The same numbers by any engine, through whole runs: Megatron trains on what a run by the light engines recorded as
that run did; and of the rows that vLLM drew, all engines and transformers alone give the same log-probabilities."""

import numpy as np
import pytest
from place import rows_of
from replays import How, hold, recorded, run

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]


def megatron(update, devices=2, options=""):
    return How(update, f"megatron {options}", f"dp = {devices}", devices=devices)


DENSE = {
    "megatron tp 2": megatron("tp = 2"),
    "megatron pp 2": megatron("pp = 2"),
    "megatron pp 2, vpp 2": megatron("pp = 2, vpp = 2", options="{ micro_batch = 2 }"),
    "megatron tp 2, pp 2": megatron("tp = 2, pp = 2", devices=4),
    "megatron dp 2, zero 1": megatron("dp = 2, zero = 1"),
}


@pytest.fixture(scope="module")
def wanted(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("recorded") / "one")


@pytest.mark.parametrize("name", DENSE)
def test_a_replay_computes_the_numbers_of_the_recorded_run(name, wanted, tmp_path):
    hold(name, DENSE[name], wanted, tmp_path)


def test_a_replay_of_a_mixture_with_divided_experts_does_too(tmp_path):
    wanted = recorded(tmp_path / "one", "mixture")
    hold("megatron dp 2, ep 2", megatron("dp = 2, ep = 2"), wanted, tmp_path, "mixture")


LONGER = [("response  : i32[<= 5]", "response  : i32[<= 16]")]
DREW = How(generator="vllm")
SCORED = How(
    trainer="megatron", more="layout reference.infer { dp = 1 }\n  engine reference.infer = fsdp { micro_batch = 5 }"
)


@pytest.mark.parametrize("kind", ["dense", "mixture"])
def test_log_probabilities_are_those_of_any_engine(kind, tmp_path):
    """Two iterations, the second with weights that were trained and resharded."""
    drew = run(tmp_path / "drew", DREW, "--record", kind=kind, iterations=2, changes=LONGER)
    scored = run(
        tmp_path / "scored", SCORED, "--record", "--replay", str(drew), kind=kind, iterations=2, changes=LONGER
    )
    for iteration in range(2):
        rows = rows_of(drew, iteration)
        again = rows_of(scored, iteration)
        assert rows["response"] == again["response"]
        found = {
            "vllm": flat(rows["response_logp"]),
            "fsdp": flat(rows["old_logp"]),
            "megatron": flat(again["old_logp"]),
        }
        if not iteration:
            found["fsdp, frozen"] = flat(again["ref_logp"])
            found["transformers"] = alone(tmp_path / "drew" / "model", rows)
        wanted = found["transformers"] if not iteration else found["fsdp"]
        away = {name: float(np.abs(value - wanted).max()) for name, value in found.items()}
        print(f"\n{kind}, {len(wanted)} tokens, iteration {iteration}: {away}")
        assert max(away.values()) < 1e-5, away


def flat(column):
    return np.concatenate([np.array(row) for row in column.to_pylist()])


def alone(folder, rows):
    """What transformers gives of each row by itself."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for prompt, response in zip(rows["prompt"].to_pylist(), rows["response"].to_pylist(), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        found.append(torch.log_softmax(logits, -1).gather(1, torch.tensor(response)[:, None])[:, 0].numpy())
    return np.concatenate(found)
