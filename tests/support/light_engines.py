"""The light engines on one rank: prompts, models and ways of sampling."""

import numpy as np
from folders import ROOT

from msrl_graph.backends.engine_protocols import Sampling
from msrl_graph.diagnostics import NOWHERE
from msrl_graph.model import models

EXAMPLE = ROOT / "examples" / "arithmetic"


PROMPTS = [np.array([6, 10, 13, 7, 11, 15]), np.array([3, 13, 4, 15]), np.array([12, 13, 12, 12, 15])]


def model(dtype=None):
    return models.load("./model", EXAMPLE, dtype, NOWHERE)


def sampling(**changes):
    fields = {
        "samples": 1,
        "max_tokens": 5,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "ends": (1,),
    }
    return Sampling(**(fields | changes))
