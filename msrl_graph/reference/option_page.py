"""The page docs/reference/options.md, filled in from the declarations of options.

Invariant: names, values, defaults and meanings of options come from ir/run_options.py. options.md in this folder has
the rest of the page, with the code blocks `options run` and `options export`, which become tables.

`python -m msrl_graph.reference.option_page` prints the page.
"""

from __future__ import annotations

import re
from pathlib import Path

from ..ir.run_options import DeclaredOptions, ExportOptions, OptionDeclaration, RunOptions

SOURCE = Path(__file__).parent / "options.md"
TABLES: dict[str, type[DeclaredOptions]] = {"run": RunOptions, "export": ExportOptions}
_BLOCK = re.compile(r"^```options (\w+)\n```$", re.MULTILINE)


def document() -> str:
    """Return the text of docs/reference/options.md."""
    return _BLOCK.sub(lambda match: _table(TABLES[match[1]]), SOURCE.read_text(encoding="utf-8"))


def _table(options: type[DeclaredOptions]) -> str:
    rows = [
        f"| `{option.flag}{option.value and f' {option.value}'}` | `{option.argument}={option.value or True}` | "
        f"{_meaning(option)} |"
        for option in options.declared()
    ]
    return "\n".join(["| command line | Python | meaning |", "|---|---|---|", *rows])


def _meaning(option: OptionDeclaration) -> str:
    text = re.sub(r"(--[a-z-]+)", r"`\1`", option.meaning())
    return text if option.evaluates else f"{text}. Not with `--evaluate`"


if __name__ == "__main__":
    print(document(), end="")
