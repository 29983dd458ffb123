"""Data on the Hugging Face Hub, found by the library datasets.

Invariant: all processes of a run read the same commit of a dataset. The library finds the files of a subset and a
split, and fetches them into its own cache (HF_HOME). It runs no code of the dataset. The files are read like local
files, because the library's own readers infer types.
"""

from __future__ import annotations

from typing import Any

from ..diagnostics import Diagnostic, Fault
from ..ir.plan import DataSource
from .data_files import HUB, choose_split

_REASON = 300  # characters of the library's message that are shown


def is_hub(path: str) -> bool:
    return path.startswith(HUB)


def pin(data: DataSource) -> str:
    """Return the path of data on the Hub with the current commit. Raises Fault."""
    name, _, commit = _name(data).partition("@")
    if commit:
        return data.path
    with _Errors(data):
        from huggingface_hub import HfApi

        return f"{HUB}{name}@{HfApi().dataset_info(name).sha}"


def fetch(data: DataSource) -> tuple[str, ...]:
    """Return the files of data on the Hub, in the cache of this host.

    Files that are not in the cache are fetched. Raises Fault.
    """
    name, _, commit = _name(data).partition("@")
    with _Errors(data):
        import datasets
        from huggingface_hub import hf_hub_download

        subset = data.options.subset or None
        builder = datasets.load_dataset_builder(name, subset, revision=commit or None)
        by_split = {str(split): [*files] for split, files in (builder.config.data_files or {}).items()}
        paths = [str(url).partition("@")[2].partition("/")[2] for url in by_split[choose_split(data, [*by_split])]]
        return tuple(hf_hub_download(name, path, repo_type="dataset", revision=commit or None) for path in paths)


def _name(data: DataSource) -> str:
    return data.path.removeprefix(HUB)


class _Errors:
    """Converts errors of the library in the `with` block into a Fault."""

    def __init__(self, data: DataSource) -> None:
        self.data = data

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or isinstance(error, Fault) or not isinstance(error, Exception):
            return
        name = _name(self.data).partition("@")[0]
        if isinstance(error, ModuleNotFoundError):
            help = "install it: pip install 'msrl-graph[run]'"
            message = f"`{name}` is found by the package datasets, which is not installed"
            raise Fault(Diagnostic("not-installed", message, self.data.span, help)) from None
        reason = " ".join(str(error).split())[:_REASON]
        message = f"there is no file or folder `{name}`, and it cannot be read from the Hugging Face Hub: {reason}"
        help = "check the path; for a private dataset, run `hf auth login`; without a network, name a file"
        raise Fault(Diagnostic("missing-file", message, self.data.span, help)) from error
