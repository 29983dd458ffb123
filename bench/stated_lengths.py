"""Engines whose responses have stated lengths: plug-ins of a run that bench/gpu.py starts.

Random weights end a response at random. So the file `lengths.json` in the model's folder states the length of each
response of a batch, in order, and whether the engine computes the tokens. If not, the tokens are random numbers, and
only what trains is measured. A request for one token, such as that of the proof of delivery, is always computed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from msrl_graph.backends.engine_protocols import GenerateRequest, Response
from msrl_graph.backends.hf_spec import SPEC as HF_SPEC
from msrl_graph.backends.spec import EngineSpec
from msrl_graph.backends.vllm.spec import SPEC as VLLM_SPEC

FILE = "lengths.json"  # in a model's folder
TAIL = "_stated"  # of the engines' names


def write_lengths(model: Path, lengths: list[int], computed: bool) -> None:
    (model / FILE).write_text(json.dumps({"lengths": lengths, "computed": computed}))


class StatedLengths:
    """A generator that ends each response at its stated length."""

    def __init__(self, engine: Any, weights: Any) -> None:
        stated = json.loads((Path(weights.model.path) / FILE).read_text())
        self.engine = engine
        self.lengths = stated["lengths"]
        self.computed = stated["computed"]
        self.vocabulary = weights.model.vocabulary

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def generate(self, request: GenerateRequest) -> Iterator[Response]:
        lengths = np.minimum(np.resize(self.lengths, len(request.keys)), request.sampling.max_tokens)
        if self.computed or lengths.max() == 1:
            yield from self.engine.generate(replace(request, sampling=replace(request.sampling, max_tokens=lengths)))
            return
        generator = np.random.default_rng(int(request.keys[0]))
        logp = -np.log(self.vocabulary)
        for place, length in enumerate(lengths.tolist()):
            tokens = generator.integers(2, self.vocabulary, length, np.int32)
            yield Response(place, tokens, np.full(length, logp, np.float32))


def _build(spec: EngineSpec) -> Callable[..., StatedLengths]:
    return lambda weights, placement, devices: StatedLengths(spec.build_engine(weights, placement, devices), weights)


build_hf, build_vllm = map(_build, (HF_SPEC, VLLM_SPEC))
HF, VLLM = (
    replace(spec, name=f"{spec.name}{TAIL}", build=f"{__name__}:build_{spec.name}") for spec in (HF_SPEC, VLLM_SPEC)
)


def install(folder: Path) -> None:
    """Write a package with these engines into `folder`, which is for PYTHONPATH."""
    (folder / f"{__name__}.py").write_text(Path(__file__).read_text(encoding="utf-8"), encoding="utf-8")
    metadata = folder / f"{__name__}-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {__name__}\nVersion: 1\n")
    points = "".join(f"{spec.name} = {__name__}:{spec.name.removesuffix(TAIL).upper()}\n" for spec in (HF, VLLM))
    (metadata / "entry_points.txt").write_text(f"[msrl_graph.engines]\n{points}")
