"""A family with a fault in its layers."""

from dataclasses import replace

from .helium import FAMILY as HELIUM


def _layers(config):
    yield from HELIUM.layers(config)
    raise KeyError("no such layer")


FAMILY = replace(HELIUM, name="faulty", architecture="FaultyForCausalLM", layers=_layers)
