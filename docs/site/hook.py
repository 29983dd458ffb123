"""A hook of mkdocs: the site is the Markdown files of the repository, as they are.

A page has the path in the site that it has in the repository, so a link works in both. The pages are README.md,
docs/*.md, the other Markdown files at the root, and all that they link to. A linked file that is not Markdown (a
program in examples/, a module) becomes a page that shows it, and a folder a list of its files, so that no link is left
out and mkdocs checks each of them. Anchors are GitHub's.
"""

from __future__ import annotations

import posixpath
from pathlib import Path
from urllib.parse import unquote, urlsplit

from markdown_links import find_links, github_anchor
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[2]
STARTS = ("*.md", "docs/*.md")
COPIED = {".css", ".gif", ".jpg", ".png", ".svg"}
LANGUAGES = {".py": "python", ".rlg": "rlg", ".toml": "toml"}


class ShownFile(File):
    """A page that shows a file of the repository which is not Markdown, or lists a folder."""

    def is_documentation_page(self) -> bool:
        return True


def on_config(config: MkDocsConfig) -> None:
    config.mdx_configs["toc"]["slugify"] = github_anchor


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files of docs/ by the pages of the repository; the theme's files stay."""
    stylesheets = [ROOT / path for path in config.extra_css]
    todo = [*stylesheets, *(path for pattern in STARTS for path in sorted(ROOT.glob(pattern)))]
    in_navigation = set(todo)
    found: dict[Path, File] = {}
    while todo:
        path = todo.pop(0)
        if path in found:
            continue
        found[path] = file = _file(path, config)
        if path not in in_navigation:
            file.inclusion = InclusionLevel.NOT_IN_NAV
        if path.suffix == ".md":
            todo += _linked(path)
    return Files([*(file for file in files if file.src_dir != config.docs_dir), *found.values()])


def _linked(page: Path) -> list[Path]:
    """Return the files and folders of the repository that a page links to."""
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
    page.content_string = f"---\nsearch:\n  exclude: true\n---\n\n# `{name}`\n\n{shown}\n"
    return page
