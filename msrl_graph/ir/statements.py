"""The declarations of all statements with attributes.

Invariant: every statement of the language that has attributes is in `STATEMENTS`.
"""

from __future__ import annotations

from .attribute_schema import DeclaredAttributes
from .attributes import (
    CallAttributes,
    GenerateAttributes,
    InferAttributes,
    ReshardingEdgeAttributes,
    SampleEdgeAttributes,
    SourceAttributes,
    UpdateAttributes,
)
from .data_options import DataOptions
from .evaluate_options import EvaluateOptions
from .options import (
    ClusterOptions,
    DockOptions,
    EngineOptions,
    LayoutOptions,
    ModelOptions,
    ReshardOptions,
    Run,
)
from .worker_attributes import WorkerAttributes

# The declaration of each statement, by its name in messages and in the reference.
STATEMENTS: dict[str, type[DeclaredAttributes]] = {
    "worker": WorkerAttributes,
    "source": SourceAttributes,
    "generate": GenerateAttributes,
    "infer": InferAttributes,
    "update": UpdateAttributes,
    "function": CallAttributes,
    "sample edge": SampleEdgeAttributes,
    "resharding edge": ReshardingEdgeAttributes,
    "cluster": ClusterOptions,
    "model": ModelOptions,
    "data": DataOptions,
    "layout": LayoutOptions,
    "engine": EngineOptions,
    "dock": DockOptions,
    "reshard": ReshardOptions,
    "evaluate": EvaluateOptions,
    "run": Run,
}
