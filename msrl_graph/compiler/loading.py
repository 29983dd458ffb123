"""A plan that was written into a file, or stands in a script.

Invariant: what is loaded is a plan of this version of which the verifier says nothing; all else is a Fault, bad-plan.
"""

from __future__ import annotations

from itertools import chain

from ..diagnostics import Diagnostic, Fault
from ..ir import verify
from ..ir.plan import FORMAT_VERSION, Plan, from_json
from .pipeline import PASSES


def load(data: bytes, name: str) -> Plan:
    """The plan of a JSON text; `name` is what to call it. Raises Fault."""
    import msgspec

    try:
        # First of all: a plan of another format may not have the fields of this one.
        version = msgspec.json.decode(data, type=dict[str, msgspec.Raw]).get("format_version", msgspec.Raw(b"1"))
        if bytes(version) != b"%d" % FORMAT_VERSION:
            wrong = f"its format is {bytes(version).decode()}, this version reads {FORMAT_VERSION}"
            raise msgspec.ValidationError(wrong)
        plan = from_json(data)
        if fault := next(chain(verify.names(plan), PASSES.verify(plan)), ""):
            raise msgspec.ValidationError(fault)
        return plan
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        help = "write it anew: msrl-compile FILE --format json -o plan.json"
        raise Fault(Diagnostic("bad-plan", f"{name} is not a plan of this version: {error}", help=help)) from None
