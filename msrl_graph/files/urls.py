"""Files at URLs that fsspec can read, and the copies of these files on a host.

Invariant: a copy is complete or absent. The files are fetched into a temporary folder next to the copy's final path.
Each file's size is compared with the size that the file system reported, and then the folder is renamed. The name of a
copy contains a digest of the URL and the version, so a copy never changes. If several processes of a host need the same
copy, one fetches it and the others wait. fsspec is imported only when a URL is read.

fsspec's own caches (`filecache`, `simplecache`) do not keep this invariant: they write a file under its final name
while it is fetched, fetch it once for each process, and may return another version than that with which a run began.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from threading import Thread
from typing import Any, TypeVar

from ..diagnostics import NOWHERE, Diagnostic, Fault, Span, nearest
from ..diagnostics.surface import name_option
from . import private
from .untrusted_folder import escape

T = TypeVar("T")
_URL = re.compile(r"[a-z][a-z0-9+.-]*://.+", re.DOTALL)
_PIN = re.compile(r"(.+)#([0-9a-f]{16})", re.DOTALL)
# Properties of a file that change with its content, under the names that file systems give them.
_TAGS = {"etag", "last-modified", "lastmodified", "last_modified", "mtime", "modified", "updated", "content-md5"}
# The packages that fsspec needs for a protocol.
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "http": "aiohttp", "https": "aiohttp"}
_PACKAGES |= {"hdfs": "pyarrow", "abfs": "adlfs", "abfss": "adlfs", "az": "adlfs", "oss": "ossfs", "sftp": "paramiko"}
ANSWER = 30.0  # seconds without an answer until a file system counts as unreachable
CACHE = "urls"  # the folder of the copies in this user's cache
KEPT = 30 * 86400.0  # seconds until an unused copy is removed


@dataclass(frozen=True)
class RemoteListing:
    """The files at a URL with their sizes.

    - `files`: the size of each file in bytes (None: unknown). The keys are paths below the URL; for a URL of a single
      file, the key is the name of the file.
    - `version`: a digest of the files' sizes and of properties such as the modification time.
    """

    files: Mapping[str, int | None]
    version: str


def is_url(text: str) -> bool:
    return _URL.fullmatch(text) is not None


def is_same_place(one: str, other: str) -> bool:
    """Return whether two paths or URLs name the same file or folder.

    A path and its `file://` URL name the same file.
    """
    return _canonical(one) == _canonical(other)


def _canonical(text: str) -> str:
    if is_url(text) and not text.startswith("file://"):
        return text.rstrip("/")
    return str(Path(text.removeprefix("file://")).resolve())


def strip_version(url: str) -> str:
    """Return a URL without the version that `pin_version` appended."""
    match = _PIN.fullmatch(url)
    return match[1] if match else url


def name(url: str) -> str:
    """Return the name of the file or folder at a URL: the last component of its path."""
    return PurePosixPath(strip_version(url).split("?")[0].rstrip("/")).name


def join(url: str, *names: str) -> str:
    return "/".join((strip_version(url).rstrip("/"), *names))


def copies_folder() -> Path:
    """Return the folder in which this host stores its copies of files at URLs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "msrl_graph" / CACHE


def open_filesystem(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL, and the URL's path in that file system.

    Raises errors of fsspec, which `report_errors` converts into a Fault.
    """
    import fsspec

    fs, path = fsspec.core.url_to_fs(strip_version(url))
    fs.invalidate_cache()
    return fs, path


@contextmanager
def report_errors(url: str, span: Span = NOWHERE) -> Iterator[None]:
    """Convert any error in the `with` block into a Fault about the URL.

    `span` is the position of the Fault: the line of the program that names the URL.
    """
    try:
        yield
    except Fault:
        raise
    except Exception as error:  # each file system raises what its library does
        raise Fault(_explain_error(strip_version(url), error, span)) from None


def _explain_error(url: str, error: Exception, span: Span) -> Diagnostic:
    protocol = url.partition("://")[0]
    if isinstance(error, ImportError):
        help = f"pip install {_PACKAGES[protocol]}" if protocol in _PACKAGES else f"fsspec says: {error}"
        return Diagnostic("not-installed", f"reading `{url}` needs a package that is not installed", span, help)
    if isinstance(error, ValueError) and "rotocol not known" in str(error):
        from fsspec.registry import known_implementations

        message = f"fsspec cannot read `{url}`: it has no protocol {protocol}"
        return Diagnostic("bad-value", message, span, nearest(protocol, known_implementations))
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__) or error
    if isinstance(error, PermissionError) or getattr(cause, "status", 0) in (401, 403):
        help = "provide credentials where the file system's package looks for them"
        return Diagnostic("missing-file", f"this process may not read `{url}`", span, help)
    if isinstance(error, FileNotFoundError) and (cause is error or getattr(cause, "status", 0) == 404):
        return Diagnostic("missing-file", f"there is nothing at `{url}`", span)
    reason = f"{type(cause).__name__}: {cause}".strip(": ").splitlines()[0]
    return Diagnostic("missing-file", f"`{url}` cannot be read: {reason}", span)


def list_remote(url: str, folder: bool = False, span: Span = NOWHERE) -> RemoteListing:
    """List the file at a URL, or with `folder` all files in the folder at a URL.

    For a folder, files in its direct subfolders are included, but not files in deeper folders. Raises Fault at `span`.
    """
    with report_errors(url, span):
        return _with_timeout(lambda: _list_files(url, folder))


def _list_files(url: str, folder: bool) -> RemoteListing:
    fs, path = open_filesystem(url)
    if folder:
        infos = {
            os.path.relpath(file_path, path): info for file_path, info in fs.find(path, maxdepth=2, detail=True).items()
        }
        infos = {file: i for file, i in infos.items() if not file.startswith("..")}
        if link := next((file for file, i in infos.items() if _leads_outside(fs, path, file, i)), ""):
            raise OSError(f"its file {link} is a link that leads out of the folder")
        # A listing may have no sizes, as a page of links does.
        infos = {
            file: i if i.get("size") is not None else fs.info(f"{path.rstrip('/')}/{file}") for file, i in infos.items()
        }
    else:
        infos = {name(url): fs.info(path)}
        if infos[name(url)]["type"] != "file":
            raise IsADirectoryError(f"{strip_version(url)} is a folder")
    if not infos:
        raise FileNotFoundError(url)
    properties = [
        (file, i["size"], *((key, str(value)) for key, value in i.items() if key.lower() in _TAGS))
        for file, i in sorted(infos.items())
    ]
    version = hashlib.sha256(repr(properties).encode()).hexdigest()[:16]
    return RemoteListing({file: i["size"] for file, i in infos.items()}, version)


def _leads_outside(fs: Any, path: str, file: str, info: Mapping[str, Any]) -> bool:
    """Return whether a file is a link to a target outside its folder.

    A link of this kind is not fetched, because a copy would contain the content of the target. The target of a link is
    known only for files on this host. In other file systems this function returns True for every link.
    """
    if "file" in (fs.protocol if isinstance(fs.protocol, tuple) else (fs.protocol,)):
        return escape(Path(path, file), Path(path)) is not None
    return bool(info.get("islink")) or info.get("type") == "link"


def _with_timeout(ask: Callable[[], T]) -> T:
    """Call `ask` and return its result; raise TimeoutError after `ANSWER` seconds.

    Without this limit, a file system may retry for minutes before it raises an error.
    """
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:
            answer.set_exception(error)

    # Not a thread pool: a process waits for its threads when it ends, and this thread may take long.
    Thread(target=run, daemon=True).start()
    try:
        return answer.result(ANSWER)
    except TimeoutError:
        if answer.done():
            raise
        raise TimeoutError(f"no answer within {ANSWER:g} s") from None


def pin_version(url: str, folder: bool = False, span: Span = NOWHERE) -> str:
    """Return a URL with the current version of its content appended. Raises Fault.

    When `copy` gets a URL with a version, it never returns a copy of another version.
    """
    return f"{strip_version(url)}#{list_remote(url, folder, span).version}"


def copy(url: str, folder: bool = False, only: Sequence[str] = (), span: Span = NOWHERE) -> Path:
    """Return the path of this host's copy of a file or folder at a URL. Raises Fault.

    If the host has no copy, the files are fetched. `folder` says whether the URL is the URL of a folder. `only` has the
    names of the files to copy from a folder; if `only` is empty, all files are copied.
    """
    match = _PIN.fullmatch(url)
    if match and (existing := _copy_path(url, match[2], only)).is_dir():
        return _mark_used(existing, url, folder)
    listing = list_remote(url, folder, span)
    if match and match[2] != listing.version:
        message = f"the content of `{match[1]}` has changed since the run started"
        raise Fault(Diagnostic("missing-file", message, span, "start the run again"))
    place = _copy_path(url, listing.version, only)
    files = {file: size for file, size in listing.files.items() if not only or file in only}
    with _lock_copy(place, span), report_errors(url, span):
        if not place.is_dir():
            _remove_old_copies()
            fetch(url if folder else join(url).rpartition("/")[0], files, place)
    return _mark_used(place, url, folder)


def fetch(url: str, files: Mapping[str, int | None], place: Path) -> None:
    """Fetch files below a URL into a new folder `place`.

    `files` maps paths below the URL to sizes in bytes (None: unknown). The folder has a temporary name until it is
    complete. Raises errors of fsspec, which `report_errors` converts into a Fault.
    """
    fs, path = open_filesystem(url)
    partial = Path(tempfile.mkdtemp(prefix=f"{place.name}.", dir=place.parent))
    try:
        for file, size in files.items():
            target = partial / file
            target.parent.mkdir(parents=True, exist_ok=True)
            fs.get_file(f"{path.rstrip('/')}/{file}", str(target))
            if size is not None and (received := target.stat().st_size) != size:
                raise OSError(f"{file} has {received} bytes instead of {size}")
        partial.chmod(0o755)
        with suppress(OSError):  # without file locks another process may have been first
            partial.rename(place)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def names(url: str) -> list[str]:
    """List the names of the files and folders in a folder at a URL.

    The list is empty if there is no folder at the URL. Raises errors of fsspec, which `report_errors` converts into a
    Fault.
    """
    fs, path = open_filesystem(url)
    try:
        return sorted(
            {PurePosixPath(entry.rstrip("/")).name for entry in fs.ls(path, detail=False) if entry.rstrip("/") != path}
        )
    except FileNotFoundError:
        return []


def send(folder: Path, url: str, wanted: Sequence[str], atomic: bool = False) -> None:
    """Upload files and subfolders of a folder to a URL.

    `wanted` has the names to upload; names that do not exist in the folder are skipped. With `atomic`, each file is
    uploaded under a temporary name and renamed when it is complete. Some file systems rename a file by copying it.
    Raises OSError for every error.
    """
    try:
        fs, path = open_filesystem(url)
        for file in (
            source
            for entry in wanted
            for source in (sorted((folder / entry).rglob("*")) or [folder / entry])
            if source.is_file() and not source.is_symlink()
        ):
            target = PurePosixPath(file.relative_to(folder))
            parent = "/".join((path.rstrip("/"), *target.parts[:-1]))
            fs.makedirs(parent, exist_ok=True)
            put = f"{parent}/.{target.name}" if atomic else f"{parent}/{target.name}"
            fs.put_file(str(file), put)
            if atomic:
                fs.mv(put, f"{parent}/{target.name}")
    except Exception as error:
        raise OSError(_explain_write_error(url, error).message) from None


def remove(url: str, wanted: Sequence[str]) -> None:
    """Remove the files and folders with the names `wanted` below a URL.

    Names that do not exist are skipped. Raises OSError.
    """
    try:
        fs, path = open_filesystem(url)
        for target in (f"{path.rstrip('/')}/{entry}" for entry in wanted):
            if fs.exists(target):
                fs.rm(target, recursive=True)
    except Exception as error:
        raise OSError(_explain_write_error(url, error).message) from None


def check_writable(url: str) -> None:
    """Raise Fault if no file can be written at a URL."""

    protocol = url.partition("://")[0]

    def attempt() -> None:
        if protocol in ("http", "https"):
            raise NotImplementedError  # few servers accept uploads, and none can list and remove them
        fs, path = open_filesystem(url)
        folder = path.rstrip("/")
        bucket = path.partition("/")[0]
        if bucket and not fs.exists(bucket):  # making a folder in it would create the bucket
            raise FileNotFoundError(f"there is no {bucket}")
        is_new = not fs.exists(folder)
        fs.makedirs(folder, exist_ok=True)
        target = f"{folder}/.{uuid.uuid4().hex}"
        fs.pipe_file(target, b"")
        fs.rm_file(target)
        if is_new:
            with suppress(OSError):  # on some file systems folders are only parts of names
                fs.rmdir(folder)

    try:
        _with_timeout(attempt)
    except NotImplementedError:
        message = f"nothing can be written at `{url}`: {protocol}:// is read-only"
        raise Fault(Diagnostic("bad-value", message, help=f"name another with {name_option('out')}")) from None
    except Exception as error:
        raise Fault(_explain_write_error(url, error)) from None


def _explain_write_error(url: str, error: Exception) -> Diagnostic:
    diagnostic = _explain_error(strip_version(url), error, NOWHERE)
    message = f"nothing can be written at `{strip_version(url)}`: {type(error).__name__}: {error}"
    return (
        diagnostic
        if diagnostic.code != "missing-file"
        else Diagnostic("bad-value", message, help=f"name another with {name_option('out')}")
    )


def _copy_path(url: str, version: str, only: Sequence[str]) -> Path:
    digest = hashlib.sha256("\n".join((strip_version(url).rstrip("/"), *only)).encode()).hexdigest()[:16]
    return copies_folder() / f"{digest}-{version}"


def _mark_used(place: Path, url: str, folder: bool) -> Path:
    with suppress(OSError):
        os.utime(place)
    return place if folder else place / name(url)


@contextmanager
def _lock_copy(place: Path, span: Span) -> Iterator[None]:
    """Hold a lock in the `with` block, so that only this process fetches the copy.

    The lock is for all processes of this host. `place` is the path of the copy. Raises Fault at `span` if copies cannot
    be stored.
    """
    try:
        private.cache(CACHE)
        if os.path.lexists(place):
            private.check_folder(place, private.WRITE)
        handle = os.open(place.with_name(f"{place.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        message = f"copies of files at URLs cannot be stored in {place.parent}: {error.strerror or error}"
        help = "set XDG_CACHE_HOME to a folder of your own that can be written to"
        raise Fault(Diagnostic("missing-file", message, span, help)) from None
    try:
        with suppress(OSError):  # a file system without locks: each process fetches its own copy
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _remove_old_copies() -> None:
    """Remove copies that were not used for `KEPT` seconds.

    Files from processes that were killed while they fetched a copy are removed at the same age.
    """
    for path in copies_folder().iterdir():
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > KEPT:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
