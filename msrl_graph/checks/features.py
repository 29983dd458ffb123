"""Feature check: each engine must be able to plan its models.

Invariant: after this check, no formula of a stated engine gets a model with a feature that the engine's spec does not
list. Whether a run can compute the features is checked when the run starts (compiler/unsupported.py).
"""

from __future__ import annotations

from ..backends.spec import EngineSpec
from ..diagnostics import Diagnostic
from ..ir.plan import Plan
from .stage import PlanContext


def check(plan: Plan, context: PlanContext) -> list[Diagnostic]:
    """Report each model with a feature that its engines can neither plan nor run.

    A model is reported once, if no engine has the feature. A stated engine is reported where it is stated.
    """

    def lacking(engine: EngineSpec) -> list[str]:
        return engine.capabilities.list_unplanned(model)

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
            feature = lacking(able[stated.name])[0]
            message = f"{feature} with the engine `{stated.name}` of `{node.name}` can be neither planned nor run"
            help = f"these can: {', '.join(f'`{name}`' for name in whole)}"
            diagnostics.append(Diagnostic("not-yet", message, stated.span, help))
        elif able and not whole and model.name not in told:
            told.add(model.name)
            feature = min(map(lacking, able.values()), key=len)[0]
            message = f"the model `{model.name}` has {feature}, so it can be neither planned nor run"
            help = f"no engine supports {feature} yet: use a model without it"
            diagnostics.append(Diagnostic("not-yet", message, model.span, help))
    return diagnostics
