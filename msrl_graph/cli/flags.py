"""Flags that are made from declared options, and flags that several commands have.

Invariant: a flag of msrl-run is made from the field that declares its option (ir/run_options.py).
"""

from __future__ import annotations

import argparse
from typing import Any

from ..ir.run_options import DeclaredOptions, OptionDeclaration


def add_flags(parser: argparse.ArgumentParser, options: type[DeclaredOptions]) -> None:
    """Add a flag for each declared option."""
    for option in options.declared():
        parser.add_argument(option.flag, help=option.meaning().replace("%", "%%"), **_settings(option))


def _settings(option: OptionDeclaration) -> dict[str, Any]:
    if option.kind == "switch":
        return {"action": "store_true"}
    settings: dict[str, Any] = {"metavar": option.value, "default": option.default}
    if option.kind == "number":
        settings["type"] = parse_natural
    if option.most is not None:
        settings["choices"] = range(option.most + 1)
    return settings


def add_program_flags(parser: argparse.ArgumentParser, with_model: bool = False) -> None:
    """Add the flags that say how a program is compiled."""
    parser.add_argument("--deploy", metavar="NAME", help="deploy of the file to use")
    if with_model:
        parser.add_argument(
            "--model", metavar="PRESET", help="model of the policy if the file has no deploy; plans for this machine"
        )
    parser.add_argument(
        "--set", metavar="K=V", action="append", default=[], dest="sets", help="override a param; may be repeated"
    )


def parse_sets(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> dict[str, str]:
    """Return the values of params in `--set`.

    Exits with the status for bad usage if a param has no value.
    """
    if any("=" not in setting for setting in flags.sets):
        parser.error("`--set` takes PARAM=VALUE")
    return {key.strip(): value for key, _, value in (setting.partition("=") for setting in flags.sets)}


def add_display_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say how diagnostics are shown."""
    parser.add_argument(
        "--diagnostics", choices=("full", "concise", "json"), default="full", help="how diagnostics are shown"
    )
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="colour in the output")


def parse_natural(text: str) -> int:
    """Parse the value of a flag as a whole number from 0 to 2^53."""
    if not text.isdecimal() or int(text) > 2**53:
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 to 2^53, not `{text}`")
    return int(text)
