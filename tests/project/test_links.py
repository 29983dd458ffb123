"""Links in the documentation, and pages that sources name: each file and anchor exists, by GitHub's rules."""

import difflib
import re
import sys
from urllib.parse import unquote, urlsplit

import pytest
from folders import ROOT

sys.path.insert(0, str(ROOT / "docs" / "site"))
from markdown_links import find_anchors, find_links

# The pages of the documentation, which the site has; and pages that `--explain` and tests show.
DOCUMENTATION = ("*.md", "docs/**/*.md", "examples/*.md")
PATTERNS = (*DOCUMENTATION, "msrl_graph/diagnostics/codes/*.md", "tests/data/*.md")
DOCUMENTED = sorted(str(path.relative_to(ROOT)) for pattern in DOCUMENTATION for path in ROOT.glob(pattern))
PAGES = sorted(path for pattern in PATTERNS for path in ROOT.glob(pattern))


def broken_links(page):
    """Return a line for each link of a page that leads nowhere."""
    broken = []
    for line, target in find_links(page.read_text(encoding="utf-8")):
        url = urlsplit(target)
        if url.scheme or url.netloc:
            continue
        file = (page.parent / unquote(url.path)).resolve() if url.path else page
        place = f"{page.name}:{line}: {target}"
        if not file.exists():
            names = [path.name for path in file.parent.glob("*")]
            broken.append(f"{place}: no such file{_nearest(file.name, names)}")
        elif url.fragment and file.suffix == ".md":
            anchors = find_anchors(file.read_text(encoding="utf-8"))
            if url.fragment not in anchors:
                broken.append(f"{place}: no such anchor{_nearest('#' + url.fragment, ['#' + a for a in anchors])}")
    return broken


def _nearest(name, names):
    near = difflib.get_close_matches(name, names, n=1, cutoff=0)
    return f"; the nearest is {near[0]}" if near else ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    assert not (broken := broken_links(page)), "\n" + "\n".join(broken)


def test_the_navigation_of_the_site_has_each_page_once():
    named = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(named) == DOCUMENTED


def test_the_list_of_pages_has_each_page():
    """The pages of the language have a list of their own."""
    page = ROOT / "docs" / "README.md"
    targets = {urlsplit(target).path for _, target in find_links(page.read_text(encoding="utf-8"))}
    listed = {str((page.parent / target).resolve().relative_to(ROOT)) for target in targets}
    language = "docs/reference/language/"
    assert [name for name in DOCUMENTED if name not in {*listed, "docs/README.md"} and language not in name] == []


def test_pages_that_sources_name_exist():
    """As in help texts, warnings and docstrings: `docs/guides/setup.md`."""
    folders = ("msrl_graph", "bench", "examples", "tests", "docs/site")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md")]
    named = [
        (path.relative_to(ROOT), *found)
        for path in [ROOT / "Makefile", *files]
        for found in re.findall(r"\b(docs/(?!source/|zh/)[\w/]+\.md)(?:#([\w-]+))?", path.read_text(encoding="utf-8"))
    ]
    assert len(named) > 10
    missing = [f"{path}: {file}" for path, file, _ in named if not (ROOT / file).exists()]
    assert not missing, "\n" + "\n".join(missing)
    anchors = {file: find_anchors((ROOT / file).read_text(encoding="utf-8")) for _, file, _ in named}
    missing = [f"{path}: {file}#{anchor}" for path, file, anchor in named if anchor and anchor not in anchors[file]]
    assert not missing, "\n" + "\n".join(missing)


def test_the_pages_have_links():
    assert sum(len(list(find_links(page.read_text(encoding="utf-8")))) for page in PAGES) > 300


@pytest.mark.parametrize(
    ("heading", "anchor"),
    [
        ("## The main job: `make demo SEED=n`", "the-main-job-make-demo-seedn"),
        ("# A + B  c", "a--b--c"),
        ("### `old_logp` ##", "old_logp"),
        ("## [Codes](codes.md), *all*", "codes-all"),
        ("## Größe", "größe"),
        ("<a id='x' name=\"here\"></a>", "here"),
    ],
)
def test_anchors_are_those_of_github(heading, anchor):
    assert find_anchors(heading) == [anchor]


def test_equal_headings_are_numbered_and_code_has_none():
    assert find_anchors("# A\n\n```\n# B\n```\n\n# A\n# A\n") == ["a", "a-1", "a-2"]


def test_links_in_code_and_comments_are_none():
    text = '[a](b.md#c) `[x](y.md)` ![p](p.png "title")\n\n```\n[x](y)\n```\n<!-- [x](y) -->\n'
    text += "[r]: z.md\n[two\nlines](l.md)"
    assert list(find_links(text)) == [(1, "b.md#c"), (1, "p.png"), (7, "z.md"), (9, "l.md")]


def test_a_broken_link_is_reported_with_the_nearest_name(tmp_path):
    (tmp_path / "other.md").write_text("# Checkpoints\n# Resume\n")
    page = tmp_path / "page.md"
    page.write_text("[a](other.md#resume)\n[b](other.md#resumes)\n[c](othr.md) [d](#page) https://x.org\n")
    assert broken_links(page) == [
        "page.md:2: other.md#resumes: no such anchor; the nearest is #resume",
        "page.md:3: othr.md: no such file; the nearest is other.md",
        "page.md:3: #page: no such anchor",
    ]


def test_the_files_that_the_guide_for_contributors_names_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = {name for name in re.findall(r"`([\w/.-]+)`", text) if re.search(r"\.(py|md|toml|txt)$|/$", name)}
    assert len(named) > 20
    known = [path.relative_to(ROOT).as_posix() + "/" * path.is_dir() for path in ROOT.glob("*")]
    for folder in ("msrl_graph", "tests", "docs", "examples", "bench", "constraints"):
        for path in (ROOT / folder).rglob("*"):
            known.append(path.relative_to(ROOT).as_posix() + "/" * path.is_dir())
    ends = {path[i:] for path in known for i in range(len(path)) if not i or path[i - 1] == "/"}
    assert [name for name in sorted(named) if name not in ends and not re.search("[A-Z]{4}", name)] == []
