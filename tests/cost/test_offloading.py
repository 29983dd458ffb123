"""Offloading: bytes and seconds against sums done by hand, and what the plan turns on where a program does not say."""

from __future__ import annotations

import re

import pytest
from folders import TESTS

from msrl_graph import compile
from msrl_graph.diagnostics import Fault, ProgramWarning
from msrl_graph.ir.plan import Plan

PROGRAMS = TESTS / "programs"
R1 = PROGRAMS / "two_deploys.rlg"
PAGE = PROGRAMS / "grpo_page.rlg"
# With whole experts on a rank, of which there are two copies then: more than fits beside the rest.
WHOLE = R1.read_text(encoding="utf-8").replace("ep = 16,", "ep = 16, etp = 1,")
TEXT = """import grpo
cluster four {{ device = "ascend-910c", nodes = 2, devices_per_node = 2, network = 25 GB/s,
  memory = {memory} GB, host_link = 50 GB/s }}
deploy grpo on four {{
  set prompts = 8
  set group = 4
  set prompt_len = 128
  set response_len = 512
  model policy = "qwen2.5-7b"
  data source = "deepscaler.jsonl" {{ prompt = "problem", answer = "answer" }}
  layout actor.update, reference.infer {{ dp = 4 }}
  layout actor.generate {{ tp = 2 }}
  engine actor.update = megatron {{ micro_batch = 1, recompute = full{update} }}
  engine reference.infer = megatron {{ micro_batch = 1{reference} }}
  engine actor.infer = megatron {{ micro_batch = 1 }}
  engine actor.generate = vllm {{ micro_batch = 1 }}
}}
"""
PARAMETERS = 7_615_616_512
WEIGHTS, OPTIMIZER = 2 * PARAMETERS, 12 * PARAMETERS // 4  # a device: bf16; ZeRO 1 over 4


def planned(update: str, reference: str, memory: int = 128) -> Plan:
    stated = {k: f", offload = {v}" if v else "" for k, v in (("update", update), ("reference", reference))}
    return compile("offload.rlg", text=TEXT.format(memory=memory, **stated))


def items(plan: Plan, place: str) -> dict[str, dict[str, int]]:
    return {m.phase: m.items for m in plan.memory if m.place == place}


def chosen(plan: Plan) -> dict[str, object]:
    return {
        p.node: p.engine.options["offload"]
        for p in plan.placements
        if p.engine.options.get("offload", "none") != "none"
    }


def test_each_phase_holds_what_it_computes_with() -> None:
    none, away = (planned(how, how) for how in ("none", "all"))
    reference = "reference.infer weights"
    optimizer = "actor optimizer"
    for phase, held in items(none, "device").items():
        assert held[reference] == WEIGHTS and held.get(optimizer) == (None if phase == "load" else OPTIMIZER)
    for phase, held in items(away, "device").items():
        assert held.get(reference) == (WEIGHTS if phase == "infer" else None)
        assert optimizer not in held and "actor masters" not in held
        if phase == "update":  # of 16 parts a step has one, and the next one on its way
            assert held["optimizer's parts"] == pytest.approx(OPTIMIZER / 8, rel=1e-6)
            continue
        before = items(none, "device")[phase].items()
        assert held == {k: v for k, v in before if k not in (reference, optimizer, "actor masters")} | (
            {reference: WEIGHTS} if phase == "infer" else {}
        )
    for phase, held in items(away, "host").items():
        assert held[f"offloaded {reference}"] == 2 * WEIGHTS and held[f"offloaded {optimizer}"] == 2 * OPTIMIZER
        swapped = phase in ("reshard", "generate", "swap", "infer")
        assert held.get("swapped actor weights") == (2 * WEIGHTS if swapped else None)
    assert not any("offloaded" in k for held in items(none, "host").values() for k in held)


def test_states_by_phase_are_there_for_their_update_alone() -> None:
    none, phase = (planned(how, how) for how in ("none", "phase"))
    whole = items(none, "device")
    for name, held in items(phase, "device").items():
        assert held.get("actor optimizer") == (OPTIMIZER if name == "update" else None)
        assert held.get("reference.infer weights") == (WEIGHTS if name == "infer" else None)
        if name == "update":
            assert held == {k: v for k, v in whole[name].items() if k != "reference.infer weights"}
    for held in items(phase, "host").values():
        assert held["offloaded actor optimizer"] == 2 * OPTIMIZER
    copied = {"reference.infer": WEIGHTS / 50e9, "actor.update": 2 * OPTIMIZER / 50e9}
    assert more_seconds(none, phase) == pytest.approx(copied)


def more_seconds(none: Plan, away: Plan) -> dict[str, float]:
    """By phase, what one plan takes longer than another."""
    assert none.estimate is not None and away.estimate is not None
    before = {p.name: p.seconds.value for p in none.estimate.phases}
    return {p.name: p.seconds.value - before[p.name] for p in away.estimate.phases if p.seconds.value != before[p.name]}


def test_copies_take_seconds() -> None:
    plans = [planned(how, how) for how in ("none", "all")]
    copied = {"reference.infer": WEIGHTS / 50e9, "actor.update": 2 * OPTIMIZER / 50e9}
    assert more_seconds(*plans) == pytest.approx(copied)
    assert plans[1].estimate is not None
    (basis,) = [p.seconds.basis for p in plans[1].estimate.phases if p.name == "actor.update"]
    assert "optimizer state in from host memory and back: bytes / host link" in basis


def test_activations_are_on_the_host_until_their_layer_needs_them() -> None:
    """Copies take what computing does not hide."""
    plans = {}
    for stated in ("none", "none, activations = offload", "full", "full, activations = offload"):
        text = TEXT.replace("micro_batch = 1, recompute = full", f"micro_batch = 4, recompute = {stated}")
        text = text.replace("response_len = 512", "response_len = 8192")
        plans[stated] = compile("offload.rlg", text=text.format(memory=4000, update="", reference=""))
    for how in ("none", "full"):
        kept = plans[how]
        away = plans[f"{how}, activations = offload"]
        held, left = (items(p, "device")["update"]["activations"] for p in (kept, away))
        stored = items(away, "host")["update"]["actor.update activations"] // 2  # of two devices
        # Two of 28 layers are on the device at once, and what the backward pass of a layer makes.
        assert held - stored < left < held - stored + 3 * stored / 28
        more = more_seconds(kept, away)
        if how == "full":  # inputs of layers alone
            assert more == {}
        else:
            # Of each of the micro-batches of a group's eight rows; what computing takes is hidden.
            copied = 2 * 2 * stored / 50e9
            assert 0 < more["actor.update"] < copied


def test_each_optimizer_step_copies() -> None:
    text = PAGE.read_text(encoding="utf-8").replace(
        "adamw(lr = 1e-6)", "adamw(lr = 1e-6), mini_batch = 128, epochs = 2"
    )
    engine = "  engine actor.generate = vllm {{ micro_batch = 1 }}\n"
    engine += "  engine actor.update = megatron {{ micro_batch = 1, recompute = full, offload = {} }}\n  run {{"
    plans = [
        compile(PAGE, text=text.replace("  run {", engine.format(how)), sets={"prompts": "32"})
        for how in ("none", "optimizer", "phase")
    ]
    # 512 rows are four mini-batches, twice; by phase the states are copied once.
    once = 2 * items(plans[0], "device")["update"]["actor optimizer"] / plans[0].cluster.device.host_link.value
    assert more_seconds(*plans[:2]) == pytest.approx({"actor.update": 8 * once})
    assert more_seconds(plans[0], plans[2]) == pytest.approx({"actor.update": once})


def test_only_what_must_leave_does() -> None:
    """An update takes 87.6 GB, of which the optimizer's states are 22.8 and the reference's weights 15.2."""
    assert chosen(planned("", "", 128)) == {}
    plan = planned("", "", 80)
    assert chosen(plan) == {"reference.infer": "weights"}
    (note,) = [n.text for n in plan.notes if n.about == "offload"]
    assert re.fullmatch(
        (
            r"in host memory while others compute: the weights of reference.infer; otherwise update needs \S+ GB a "
            r"device of 80 GB"
        ),
        note,
    )
    # Where the optimizer has to leave, the weights may stay if that is enough.
    optimizer = {"actor.infer": "optimizer", "actor.update": "optimizer"}
    assert chosen(planned("", "", 68)) == optimizer
    assert chosen(planned("", "", 52)) == {**optimizer, "reference.infer": "weights"}
    with pytest.raises(Fault):
        planned("", "", 40)


def test_r1_fits_and_says_why() -> None:
    plan = compile(R1, text=WHOLE, deploy="r1")
    assert chosen(plan) == {"actor.update": "optimizer", "actor.infer": "optimizer", "reference.infer": "weights"}
    (note,) = [n.text for n in plan.notes if n.about == "offload"]
    assert "the weights of reference.infer, the optimizer states of actor.update; otherwise update needs 101 GB" in note
    assert all(m.total <= m.capacity.value for m in plan.memory)


def test_a_stated_none_stays_and_what_would_fit_is_named() -> None:
    text = WHOLE.replace("recompute = full", "recompute = full, offload = none")
    with pytest.raises(Fault) as fault:
        compile(R1, text=text, deploy="r1")
    (found,) = fault.value.diagnostics
    both = (
        "`engine reference.infer = megatron { offload = weights }` and `engine actor.update = megatron { offload "
        "= optimizer }`"
    )
    assert found.code == "out-of-memory" and f"this fits: {both}" in found.help


def test_hosts_without_room_do_not_hide_what_fits_without_offloading() -> None:
    """What the search finds offloads nothing: no host could hold the weights and states that might leave its
    devices."""
    text = "\n".join(line for line in TEXT.split("\n") if "layout " not in line).replace(
        "memory = {memory} GB", "host_memory = 40 GB"
    )
    plan = compile("offload.rlg", text=text.format(update="", reference=""))
    assert plan.search is not None and plan.search.is_proven and chosen(plan) == {}


@pytest.mark.parametrize("node", ["actor.update", "critic.update"])
def test_activations_of_one_of_two_updates_may_be_offloaded(node, tmp_path):
    """The planner counts each update alone on its devices, whatever the other offloads."""
    text = f"""import ppo
cluster laptop {{ device = "cpu", devices_per_node = 2 }}
deploy ppo on laptop {{
  set prompts = 256
  set response_len = 5
  model policy = "tiny"
  model value = "tiny"
  model reward_model = "tiny"
  data source = "rows.jsonl" {{ prompt = "prompt" }}
  engine {node} = fsdp {{ activations = offload }}
}}
"""
    with pytest.warns(ProgramWarning, match=r"rows\.jsonl"):
        plan = compile(tmp_path / "p.rlg", text=text)
    update = next(m for m in plan.memory if m.place == "host" and m.phase == "update")
    assert [i for i in update.items if i.endswith("update activations")] == [f"{node} activations"]
