"""A hook of mkdocs: the site is the Markdown files of the repository, as they are.

A page has the path in the site that it has in the repository, so a link works in both. The pages are those of `STARTS`
and all that they link to. A linked file that is not Markdown (a program in examples/, a module) becomes a page that
shows it, and a folder becomes a list of its files. So every link leads to a page, and mkdocs checks it.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from markdown_links import FENCE, find_links, github_anchor
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
STARTS = ("*.md", "docs/**/*.md", "examples/*.md")
# Lists of links: every search would find them first.
LISTS = ("docs/README.md", "docs/reference/language/names.md")
COPIED = {".css", ".gif", ".jpg", ".png", ".svg"}
# Python-Markdown, unlike GitHub, needs four spaces for each level of a list and an empty line before its first item.
NESTED_ITEM = re.compile(r"^( +)(?=(?:[-*+]|\d+\.) )", re.MULTILINE)
TEXT_BEFORE_LIST = re.compile(r"^((?! *(?:[-*+]|\d+\.) )\S.*\n)(?=(?:[-*+]|1\.) )", re.MULTILINE)
LANGUAGES = {".py": "python", ".rlg": "rlg", ".toml": "toml"}


class ShownFile(File):
    """A page that shows a file of the repository which is not Markdown, or lists a folder."""

    def is_documentation_page(self) -> bool:
        return True


def on_config(config: MkDocsConfig) -> None:
    """Give headings the anchors that GitHub gives them."""
    config.mdx_configs["toc"]["slugify"] = github_anchor


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files of docs/ by the pages of the repository; the theme's files stay."""
    starts = [path for pattern in STARTS for path in sorted(ROOT.glob(pattern))]
    todo = [*starts, *(ROOT / path for path in config.extra_css)]
    found: dict[Path, File] = {}
    while todo:
        path = todo.pop(0)
        if path in found:
            continue
        found[path] = file = _file(path, config)
        if path not in starts:  # a page of STARTS that mkdocs.yml leaves out of the navigation fails the build
            file.inclusion = InclusionLevel.NOT_IN_NAV
        if path.suffix == ".md":
            todo += _linked(path)
    return Files([*(file for file in files if file.src_dir != config.docs_dir), *found.values()])


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite lists for Python-Markdown, and rank lists of links and pages outside of the navigation lower."""
    if isinstance(page.file, ShownFile):
        page.meta["search"] = {"exclude": True}
    elif page.file.inclusion is InclusionLevel.NOT_IN_NAV or page.file.src_uri in LISTS:
        page.meta["search"] = {"boost": 0.1}
    parts = []
    end = 0
    for fence in FENCE.finditer(markdown):
        parts += [_rewrite_lists(markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, _rewrite_lists(markdown[end:])])


def _rewrite_lists(text: str) -> str:
    return TEXT_BEFORE_LIST.sub(r"\1\n", NESTED_ITEM.sub(r"\1\1", text))


def _linked(page: Path) -> list[Path]:
    """Return the existing files and folders of the repository that a page links to."""
    urls = (urlsplit(target) for _, target in find_links(page.read_text(encoding="utf-8")))
    paths = (ROOT / posixpath.normpath(page.parent / unquote(url.path)) for url in urls if url.path and not url.scheme)
    return [path for path in paths if path.exists() and path.is_relative_to(ROOT)]


def _file(path: Path, config: MkDocsConfig) -> File:
    name = path.relative_to(ROOT).as_posix()
    if path.suffix == ".md" or path.suffix in COPIED:
        return File(name, str(ROOT), config.site_dir, config.use_directory_urls)
    if path.is_dir():
        shown = "\n".join(f"- `{entry.name}`" for entry in sorted(path.iterdir()) if entry.name[0] not in "._")
    else:
        fence = "`" * 6
        text = path.read_text(encoding="utf-8")
        shown = f"{fence}{LANGUAGES.get(path.suffix, 'text')}\n{text}\n{fence}"
    page = ShownFile(name, None, config.site_dir, config.use_directory_urls, dest_uri=f"{name}.html")
    page.content_string = f"# `{name}`\n\n{shown}\n"
    return page
