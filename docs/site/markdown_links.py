"""Links and anchors of Markdown files, by GitHub's rules; for the site's hook and for tests/project/test_links.py."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

FENCE = re.compile(r"^( *)(`{3,}|~{3,}).*?^ *\2[`~]* *$", re.MULTILINE | re.DOTALL)
CODE_SPAN = re.compile(r"(?<!`)(`+)(?!`)(?:(?!\n\n).)+?(?<!`)\1(?!`)", re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
# `[text](target "title")`, `[name]: target` and `<a href="target">`, also of images.
LINK = re.compile(
    r"\]\(\s*<?([^\s()<>]+(?:\([^\s()]*\)[^\s()<>]*)*)>?(?:\s+\"[^\"]*\")?\s*\)"
    r"|^ {0,3}\[[^\]]+\]:\s*<?(\S+?)>?(?:\s|$)"
    r"|<(?:a|img)\s[^>]*?(?:href|src)=\"([^\"]+)\"",
    re.MULTILINE,
)
HEADING = re.compile(r"^ {0,3}#{1,6}[ \t]+(.*?)(?:[ \t]+#+)?[ \t]*$", re.MULTILINE)
HTML_ANCHOR = re.compile(r"<[a-z]\w*\s[^>]*?\b(?:id|name)=\"([^\"]+)\"")


def find_links(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the target of each link that is neither in code nor in a comment."""
    text = _blank(CODE_SPAN, _blank(COMMENT, _blank(FENCE, text)))
    for match in LINK.finditer(text):
        yield text.count("\n", 0, match.start()) + 1, next(filter(None, match.groups()))


def find_anchors(text: str) -> list[str]:
    """Return the anchors of a file: those of its headings, in order, and those in HTML."""
    text = _blank(COMMENT, _blank(FENCE, text))
    seen = Counter[str]()
    anchors = []
    for title in HEADING.findall(text):
        anchor = github_anchor(re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", title))
        anchors.append(f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor)
        seen[anchor] += 1
    return anchors + HTML_ANCHOR.findall(_blank(CODE_SPAN, text))


def github_anchor(title: str, separator: str = "-") -> str:
    """Return the anchor of a heading: letters in lower case, digits, `_` and `-`; each blank is a separator."""
    return re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", separator)


def _blank(pattern: re.Pattern[str], text: str) -> str:
    """Remove what matches, but keep the lines."""
    return pattern.sub(lambda match: "\n" * match[0].count("\n"), text)
