"""Targets of the Makefile: each is listed with its help, by `make` or by `make help-all`."""

import os
import re
import subprocess

from folders import ROOT

SHORT = 12  # lines that a newcomer reads
WIDTH = 130


def make(*arguments):
    """Return what make prints; not as a part of the `make test` that may run this."""
    own = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    done = subprocess.run(["make", *arguments], cwd=ROOT, env=own, capture_output=True, text=True, timeout=60)
    return done.stdout


def names(listed):
    return [line.split()[0] for line in listed.splitlines()]


def test_every_target_is_listed():
    """Targets that are no files: those that `make` knows, and those with a rule, whether it is phony or not."""
    listed = names(make("help-all"))
    (phony,) = re.findall(r"^\.PHONY:(.*)$", make("-pq", "help"), re.MULTILINE)
    rules = re.findall(r"^([\w-]+):(?!=)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    unlisted = {*phony.split(), *rules} - {*listed}
    assert not unlisted, f"end these rules with `#: text`, or `## text` for the short list: {sorted(unlisted)}"
    assert len(listed) == len({*listed}) == len(rules)
    assert {*listed} == {*phony.split()}


def test_the_list_of_make_is_short():
    listed = make().splitlines()
    assert {"demo", "test", "lint", "docs", "help-all"} <= {*names(make())}
    assert len(listed) <= SHORT, "write `#: text` in place of `## text` for what a newcomer does not need"


def test_a_target_has_one_line():
    long = [line for line in make("help-all").splitlines() if len(line) > WIDTH or len(line.split()) < 3]
    assert not long
