"""What a compiled library has for Python, said as a stub says it: the operators that it registers with torch, and what
it binds of a class.

Invariant: what is read are the schemas that the library hands to torch's dispatcher, which parses calls by them; they
lie in it as text. A package's documentation and its functions for tensors without memory say the same operators by
other names of parameters, and nothing is called by those. Of a class it is what its header declares, under names that
the library has. Headers and libraries are read, and nothing is loaded.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

# A schema: it stands between zeros.
SCHEMA = re.compile(r"(\w+)(?:\.\w+)?\((.*)\) -> (.+)")
# A comma before another parameter, and none in a default or a type.
NEXT = re.compile(r", (?=\*,|[A-Za-z]\w*(?:\([a-z]!?\))?(?:\[\d*\])?\??(?:\[\d*\])?\?? \w)")
PARAMETER = re.compile(r"\S+ (\w+)(=.*)?")
# In a header: a method that gives a text, and a parameter.
METHOD = re.compile(r"^\s*std::string (\w+)\(([^)]*)\);", re.MULTILINE)
DECLARED = re.compile(r"[\w:]+ (\w+)( = \w+)?")
TYPES = {"Tensor": "torch.Tensor", "Tensor[]": "list[torch.Tensor]", "int": "int", "str": "str", "bool": "bool"}


def stub(library: str, exported: set[str]) -> str:
    """Of those operators that a package gives the names of."""
    said = (SCHEMA.fullmatch(text) for text in _with(library, ") -> "))
    found = dict.fromkeys(m.groups() for m in said if m and m[1] in exported)
    forms = Counter(name for name, *_ in found)
    lines = ["import torch", "from typing import overload"]
    for name, takes, gives in found:
        lines += ["@overload"] * (forms[name] > 1)
        lines.append(f"def {name}({', '.join(map(_parameter, NEXT.split(takes)))}){_result(gives)}: ...")
    return "\n".join(lines)


def bound(header: str, library: str, name: str) -> str:
    """The class of a header, with those of its methods that the library has Python's names of."""
    lines = [f"class {name}:"]
    for method, takes in METHOD.findall(header):
        snake = re.sub(r"(?<!^)([A-Z])", r"_\1", method).lower()
        if f"\0{snake}\0" in library:
            given = [DECLARED.fullmatch(one) for one in takes.split(", ") if one]
            names = [f"{one[1]}=..." if one[2] else one[1] for one in given if one]
            lines.append(f"    def {snake}({', '.join(['self', *names])}): ...")
    return "\n".join(lines)


def _with(library: str, part: str) -> Iterator[str]:
    """The texts between zeros that have a part."""
    at = library.find(part)
    while at >= 0:
        end = library.find("\0", at)
        yield library[library.rfind("\0", 0, at) + 1 : end]
        at = library.find(part, end)


def _parameter(text: str) -> str:
    if text in ("*", ""):
        return text
    found = PARAMETER.fullmatch(text)
    assert found, text
    return f"{found[1]}=..." if found[2] else found[1]


def _result(text: str) -> str:
    inside = text.removeprefix("(").removesuffix(")").split(", ")
    if not all(one in TYPES for one in inside):
        return ""
    types = ", ".join(TYPES[one] for one in inside)
    return f" -> tuple[{types}]" if text.startswith("(") else f" -> {types}"
