"""Which codes other tests hold."""

from __future__ import annotations

# Their texts depend on the machine or on a run: tested exactly in test_cli_run.py, test_api.py, test_environment.py,
# test_folders.py, test_joining.py and test_run.py.
ELSEWHERE = {
    "no-resources",
    "host-differs",
    "not-installed",
    "bad-plan",
    "bad-plug-in",
    "run-failed",
    "bad-checkpoint",
    "changed-program",
    "calibration",
    "kept-variable",
    "failing-variable",
    "unguarded-run",
    "unused-weight",
    "no-end-token",
    "converted-weights",
    "unused-setting",
    "port-taken",
    "clashing-packages",  # of engines of one's own: those of this package go together (test_interpreters.py)
}
