"""Feature check: the compiler, or an engine, must know what the model consists of.

Invariant: after this check, the compiler can plan each model: for each of its features, the compiler knows the sizes
(features.py), or an engine implements the feature. The latter are features of families that other packages add. Whether
a run can compute the features is checked when the run starts (compiler/unsupported.py).
"""

from __future__ import annotations

from ..backends.spec import EngineSpec
from ..diagnostics import Diagnostic
from ..ir.plan import Plan
from ..model.features import FEATURES
from .stage import PlanContext


def check(plan: Plan, context: PlanContext) -> list[Diagnostic]:
    """Report each model with an unknown feature that its nodes' engines lack.

    A model is reported once, if no engine has the feature. A stated engine is reported where it is stated.
    """

    def lacking(engine: EngineSpec) -> list[str]:
        return model.list_lacking(engine.capabilities.features | FEATURES.keys())

    diagnostics = []
    told = set()
    for node in plan.graph.nodes:
        if node.verb == "source" or not plan.graph.worker(node.worker).model:
            continue
        model = plan.model(node.name)
        able = {name: engine for name, engine in context.engines.items() if node.verb in engine.verbs}
        stated = plan.deploy.engines.get(node.name)
        whole = [name for name, engine in sorted(able.items()) if not lacking(engine)]
        if stated is not None and stated.name in able and whole and stated.name not in whole:
            message = f"the engine `{stated.name}` of `{node.name}` does not support {lacking(able[stated.name])[0]}"
            help = f"these can: {', '.join(f'`{name}`' for name in whole)}"
            diagnostics.append(Diagnostic("layout-divide", message, stated.span, help))
        elif able and not whole and model.name not in told:
            told.add(model.name)
            feature = min(map(lacking, able.values()), key=len)[0]
            message = f"the model `{model.name}` has {feature}, so it can be neither planned nor run"
            help = f"no engine supports {feature} yet: use a model without it"
            diagnostics.append(Diagnostic("not-yet", message, model.span, help))
    return diagnostics
