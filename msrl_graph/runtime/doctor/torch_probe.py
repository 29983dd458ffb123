"""A rule for torch: whether torch loads and sees the devices of the machine.

Torch is loaded in a separate process.

Invariant: the rule reports nothing if a rule for a lower layer of the software (BELOW) or for a visibility mask (MASKS)
has found a problem, because a failure of torch would only follow from that problem.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from ...hardware.device_kinds import ASCEND, CUDA, DeviceKind
from . import ascend, cuda, host, output_parsers
from .devices import seen
from .findings import ExaminedHost, Finding, Rule
from .machine import ABSENT, HUNG, LONG, PYTHON

BELOW = (*ascend.BELOW, *cuda.BELOW, *host.BELOW)
MASKS = (ascend.mask, cuda.mask)
# Known errors of torch, each with its next step.
KNOWN = {
    "Error 802": "the host's NVLink fabric is not up: sudo systemctl start nvidia-fabricmanager",
    "libhccl.so": "CANN is not in this environment: source its set_env.sh",
    "undefined symbol": "two packages come from different builds: install both again, in compatible versions",
}


def tried(kind: DeviceKind, code: str, examined: ExaminedHost) -> Iterator[Finding]:
    output = examined.said([PYTHON, "-c", code])
    if output["status"] == ABSENT or any(
        finding.state == "wrong" for rule in (*BELOW, *MASKS) for finding in rule(examined)
    ):
        return
    look = f"see its whole output: python -c '{code}'"
    counts = output_parsers.last_line(output["text"])
    visible = seen(examined, kind)
    if output["status"] == HUNG:
        yield Finding("import", f"torch did not find its {kind.resource} within {LONG:.0f} s", "warning", look)
    elif output["status"] != 0:
        fix = next((step for sign, step in KNOWN.items() if sign in output["text"]), look)
        yield Finding("import", f"torch sees no {kind.resource}: {counts}", "wrong", fix)
    elif counts.isdigit() and int(counts) < visible:
        yield Finding("import", f"torch sees {counts} {kind.resource}, but the host has {visible}", "wrong", look)
    else:
        yield Finding("import", f"torch sees {counts} {kind.resource}")


RULES: tuple[Rule, ...] = (partial(tried, ASCEND, ascend.CODE), partial(tried, CUDA, cuda.CODE))
