"""The engines' specs count the operators that the engines call."""

from __future__ import annotations

from typing import get_args

import engines
import numpy as np
import pytest
import torch
from place import EXAMPLE

from msrl_graph import compile
from msrl_graph.algorithms.optimizers import adamw
from msrl_graph.backends import ENGINES
from msrl_graph.backends.engine_protocols import (
    ForwardRequest,
    GenerateRequest,
    Sampling,
    StepRequest,
    collect_responses,
)
from msrl_graph.backends.spec import Act, OperatorCalls
from msrl_graph.cost.operators import layer_calls
from msrl_graph.model import lora
from msrl_graph.model.lora_settings import Lora
from msrl_graph.runtime.calibrate.probes import operators
from msrl_graph.runtime.data.columns import ragged
from msrl_graph.runtime.rank.micro_batches import pack
from msrl_graph.sharding.layout import Layout

ALONE = Layout()
# Counts are of the versions in constraints/cpu.txt; those of constraints/torch210.txt call a tenth more.
SAME = 0.1 if torch.__version__.startswith("2.13.") else 0.15


def counted(engine: str, act: Act, layers: int) -> float:
    found = ENGINES[engine].time.calls
    assert found is not None
    calls = found(act, ALONE)
    return calls.layer * layers + calls.rest


def test_a_trainer_calls_as_many_operators_as_its_spec_says() -> None:
    model = compile(EXAMPLE / "one_rank.rlg").model("actor.update")
    engine = engines.trainer(model, optimizer=adamw(lr=0.0))
    rng = np.random.default_rng(0)
    prompt, response = (ragged(list(rng.integers(3, 13, (4, n)).astype(np.int32)), np.int32) for n in (6, 4))
    packed = pack([prompt], [response], np.arange(4))

    def infer() -> None:
        engine.score([packed], ForwardRequest())

    def update() -> None:
        engines.train(engine, packed, lambda made: made.logp.sum(), ForwardRequest())

    assert operators(infer) == pytest.approx(counted("fsdp", "infer", model.layers), rel=SAME)
    assert operators(update) == pytest.approx(counted("fsdp", "update", model.layers), rel=SAME)
    engine.step(StepRequest(1e-6, 1.0))  # the first one makes the optimizer's state
    update()
    assert operators(lambda: engine.step(StepRequest(1e-6, 1.0))) == pytest.approx(
        counted("fsdp", "step", model.layers), rel=SAME
    )


@pytest.mark.parametrize("targets", [("all_linear",), ("q_proj", "v_proj")], ids=len)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_adapters_add_as_many_operators_as_the_spec_says(targets: tuple[str, ...], dropout: float) -> None:
    adapted = lora.adapt(compile(EXAMPLE / "one_rank.rlg").model("actor.update"), Lora(16, 32.0, targets, dropout))
    engine = engines.trainer(adapted, optimizer=adamw(lr=0.0))
    rng = np.random.default_rng(0)
    prompt, response = (ragged(list(rng.integers(3, 13, (4, n)).astype(np.int32)), np.int32) for n in (6, 4))
    packed = pack([prompt], [response], np.arange(4))

    def update() -> None:
        request = ForwardRequest(dropout=3 if dropout else None)
        engines.train(engine, packed, lambda made: made.logp.sum(), request)

    more = {
        act: layer_calls(act, OperatorCalls(0, 0), adapted, ENGINES["fsdp"]) * adapted.layers
        for act in ("infer", "update")
    }
    found = operators(lambda: engine.score([packed], ForwardRequest()))
    assert found == pytest.approx(counted("fsdp", "infer", adapted.layers) + more["infer"], rel=SAME)
    assert operators(update) == pytest.approx(counted("fsdp", "update", adapted.layers) + more["update"], rel=SAME)


def test_a_generator_calls_as_many_operators_as_its_spec_says() -> None:
    model = compile(EXAMPLE / "one_rank.rlg").model("actor.generate")
    engine = engines.generator(model)
    engine.ends = []
    for piece in engine.allocate():
        torch.nn.init.normal_(piece.tensor, std=0.02)
    prompts = [np.arange(3, 9, dtype=np.int32)] * 2

    def generate(tokens: int) -> int:
        return operators(
            lambda: collect_responses(
                engine.generate(GenerateRequest(prompts, np.arange(4), Sampling(2, tokens, 1.0, 1.0, 0)))
            )
        )

    one = generate(1)
    five = generate(5)
    assert one == pytest.approx(counted("hf", "prefill", model.layers), rel=0.1)
    assert (five - one) / 4 == pytest.approx(counted("hf", "decode", model.layers), rel=0.1)


def test_what_divides_a_state_never_takes_operators_away() -> None:
    for name, spec in ENGINES.items():
        for act in get_args(Act):
            for layout in (
                Layout(tp=2),
                Layout(dp=2, zero=0),
                Layout(dp=2, zero=1),
                Layout(dp=2, zero=2),
                Layout(dp=2, zero=3),
            ):
                if spec.time.calls is not None:
                    assert spec.time.calls(act, layout).layer >= spec.time.calls(act, ALONE).layer, (name, act, layout)
