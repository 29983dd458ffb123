"""Feature check: an engine must implement what the model consists of.

Invariant: after this check, each node has an engine with all features of the node's model. The node's engine is the
stated one, or one from which the planner chooses.
"""

from __future__ import annotations

from ..diagnostics import Diagnostic
from ..ir.plan import Plan
from .stage import PlanContext


def check(plan: Plan, context: PlanContext) -> list[Diagnostic]:
    """Report each model with a feature that its nodes' engines lack.

    A model is reported once, if no engine has the feature. A stated engine is reported where it is stated.
    """
    diagnostics = []
    told = set()
    for node in plan.graph.nodes:
        if node.verb == "source" or not plan.graph.worker(node.worker).model:
            continue
        model = plan.model(node.name)
        able = {name: engine for name, engine in context.engines.items() if node.verb in engine.verbs}
        stated = plan.deploy.engines.get(node.name)
        whole = [name for name, engine in sorted(able.items()) if not model.list_lacking(engine.capabilities.features)]
        if stated is not None and stated.name in able and whole and stated.name not in whole:
            lacking = model.list_lacking(able[stated.name].capabilities.features)[0]
            message = f"the engine `{stated.name}` of `{node.name}` does not support {lacking}"
            help = f"these can: {', '.join(f'`{name}`' for name in whole)}"
            diagnostics.append(Diagnostic("layout-divide", message, stated.span, help))
        elif able and not whole and model.name not in told:
            told.add(model.name)
            lacking = min((model.list_lacking(engine.capabilities.features) for engine in able.values()), key=len)[0]
            message = f"the model `{model.name}` has {lacking}"
            help = f"no engine supports {lacking} yet: use a model without it"
            diagnostics.append(Diagnostic("not-yet", message, model.span, help))
    return diagnostics
