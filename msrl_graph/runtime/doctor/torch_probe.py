"""Whether torch loads and sees the devices, as a process by itself says that was started for it.

Invariant: told only where nothing below is wrong, of which it would only follow.
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
# What torch says of a thing that has its own step.
KNOWN = {
    "Error 802": "the fabric of the host's NVLinks is not up: sudo systemctl start nvidia-fabricmanager",
    "libhccl.so": "CANN is not in this environment: source its set_env.sh",
    "undefined symbol": "two packages are of different builds: install both anew, of versions that go together",
}


def tried(kind: DeviceKind, code: str, found: ExaminedHost) -> Iterator[Finding]:
    said = found.said([PYTHON, "-c", code])
    if said["status"] == ABSENT or any(f.state == "wrong" for rule in (*BELOW, *MASKS) for f in rule(found)):
        return
    look = f"see all that it says: python -c '{code}'"
    counts = output_parsers.last_line(said["text"])
    there = seen(found, kind)
    if said["status"] == HUNG:
        yield Finding("import", f"torch does not see its {kind.resource} within {LONG:.0f} s", "warning", look)
    elif said["status"] != 0:
        known = next((step for sign, step in KNOWN.items() if sign in said["text"]), look)
        yield Finding("import", f"torch sees no {kind.resource}: {counts}", "wrong", known)
    elif counts.isdigit() and int(counts) < there:
        yield Finding("import", f"torch sees {counts} {kind.resource}, and {there} are there", "wrong", look)
    else:
        yield Finding("import", f"torch sees {counts} {kind.resource}")


RULES: tuple[Rule, ...] = (partial(tried, ASCEND, ascend.CODE), partial(tried, CUDA, cuda.CODE))
