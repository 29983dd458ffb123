"""The specs of Megatron and vLLM count the operators that the engines call on a host."""

import json
import shutil
from pathlib import Path

import engines
import numpy as np
import pytest
import torch

from msrl_graph.algorithms.optimizers import adamw
from msrl_graph.backends import ENGINES
from msrl_graph.backends.engine_protocols import (
    ForwardRequest,
    GenerateRequest,
    Sampling,
    StepRequest,
    collect_responses,
)
from msrl_graph.backends.megatron import spec as megatron
from msrl_graph.backends.spec import OperatorCalls
from msrl_graph.backends.vllm import spec as vllm
from msrl_graph.cost.operators import layer_calls
from msrl_graph.diagnostics import NOWHERE
from msrl_graph.ir.workload import Workload
from msrl_graph.model import lora, models
from msrl_graph.model.lora_settings import Lora
from msrl_graph.runtime.calibrate.probes import operators
from msrl_graph.runtime.data.columns import ragged
from msrl_graph.runtime.rank.micro_batches import pack

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "arithmetic" / "model"


def counted(engine, act, layers, python):
    """Without what Python takes beside."""
    calls = ENGINES[engine].eager("host")(act, engines.ALONE)
    return (calls.layer - python.layer) * layers + calls.rest - python.rest


@pytest.mark.parametrize("kind", ["host", "device"])
def test_kernels_are_fused_on_devices_alone(kind):
    for name in ("megatron", "vllm"):
        assert (ENGINES[name].eager(kind) is None) == (kind == "device")


@pytest.mark.parametrize(("targets", "dropout"), [((), 0), (("all_linear",), 0), (("q_proj", "v_proj"), 0.1)], ids=str)
def test_megatron_calls_as_many_operators_as_its_spec_says(targets, dropout, alone):
    model = models.load(str(EXAMPLE), Path("/"), None, NOWHERE)
    model = lora.adapt(model, Lora(4, 8.0, targets, dropout) if targets else None)
    engine = engines.built("megatron", model, engines.ALONE, 0, engines.mesh(engines.ALONE), adamw(lr=0.0))
    rng = np.random.default_rng(0)
    prompt, response = (ragged(list(rng.integers(3, 13, (4, n)).astype(np.int32)), np.int32) for n in (6, 4))
    packed = pack([prompt], [response], np.arange(4))

    def update():
        engines.train(engine, packed, lambda made: made.logp.sum(), ForwardRequest(dropout=3 if dropout else None))

    update()
    engine.step(StepRequest(1e-6, 1.0))  # the first one makes the optimizer's state
    actions = {
        "infer": lambda: engine.score([packed], ForwardRequest()),
        "update": update,
        "step": lambda: engine.step(StepRequest(1e-6, 1.0)),
    }
    for act, action in actions.items():
        wanted = counted("megatron", act, model.layers, megatron.PYTHON[act])
        if model.lora and act != "step":
            wanted += layer_calls(act, OperatorCalls(0, 0), model, ENGINES["megatron"]) * model.layers
        if not model.lora or act != "step":
            assert operators(action) == pytest.approx(wanted, rel=0.1), act


def test_vllm_calls_as_many_operators_as_its_spec_says(alone, tmp_path):
    folder = Path(shutil.copytree(EXAMPLE, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    model = models.load(str(folder), Path("/"), None, NOWHERE)
    work = Workload(model, engines.ALONE, model.dtype, rows=4, prompts=4, prompt=6, response=8, samples=1, on_host=True)
    engine = engines.built("vllm", model, engines.ALONE, 0, engines.mesh(engines.ALONE), work=work)
    for piece in engine.allocate():
        torch.nn.init.normal_(piece.tensor, std=0.02)
    engine.filled()
    prompts = [np.arange(i, i + 6, dtype=np.int32) for i in range(2, 6)]

    def generate(tokens):
        return operators(
            lambda: collect_responses(
                engine.generate(GenerateRequest(prompts, np.arange(4), Sampling(1, tokens, 1.0, 1.0, 0)))
            )
        )

    one = generate(1)
    five = generate(5)
    python = OperatorCalls(vllm.KERNELS, 0)
    assert one == pytest.approx(counted("vllm", "prefill", model.layers, python), rel=0.1)
    assert (five - one) / 4 == pytest.approx(counted("vllm", "decode", model.layers, python), rel=0.1)
