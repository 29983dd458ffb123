"""Names in the package: a reader of one file can tell what a name is."""

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "msrl_graph"
FILES = sorted(PACKAGE.rglob("*.py"))


def test_the_name_of_a_public_class_occurs_once():
    """Two classes with one name cannot be told apart in a traceback, a search or an import."""
    places = defaultdict(list)
    for path in FILES:
        for item in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(item, ast.ClassDef) and not item.name.startswith("_"):
                places[item.name].append(f"{path.relative_to(PACKAGE)}:{item.lineno}")
    repeated = [f"{name}: {', '.join(found)}" for name, found in sorted(places.items()) if len(found) > 1]
    assert not repeated, "rename all but one after their role, or begin the name with `_`:\n" + "\n".join(repeated)
