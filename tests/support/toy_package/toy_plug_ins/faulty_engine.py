"""An engine with a fault in its formula of memory."""

from dataclasses import replace

from .engine import SPEC as TOY


def _peaks(verb, work):
    return {"a step": {"KV cache": work.rows // (work.rows - work.rows)}}


SPEC = replace(TOY, name="faulty", memory=replace(TOY.memory, peaks=_peaks))
