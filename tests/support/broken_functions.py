"""A plugin of pytest that breaks the functions of the package named in BROKEN: each returns another value than it
should. It shows that a test depends on their values."""

import os
from dataclasses import replace
from functools import wraps
from importlib import import_module

import numpy as np

from msrl_graph import algorithms
from msrl_graph.ir.optimizer_spec import OptimizerSpec


def decayed(rule):
    return replace(rule, options={**rule.options, "weight_decay": 0.5})


def change(value):
    """Return another value of the same type and shape."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(change, value))
    if isinstance(value, OptimizerSpec):
        return replace(value, rule=decayed(value.rule), matrices=value.matrices and decayed(value.matrices))
    if isinstance(value, (bool, np.bool_)):
        return not value
    if isinstance(value, str):
        return f"{value}?"
    if isinstance(value, np.ndarray) and value.dtype == bool:
        return ~value
    return value + 1


def broken(function):
    @wraps(function)
    def call(*given, **options):
        return change(function(*given, **options))

    return call


def pytest_configure():
    names = os.environ["BROKEN"].split()
    for (_, name), (_, module) in algorithms.library().items():
        if name in names:
            own = import_module(f"msrl_graph.algorithms.{module}")
            found = broken(getattr(own, name))
            if getattr(found, "many", None):
                found.many = broken(found.many)
            setattr(own, name, found)
