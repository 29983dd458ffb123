"""What lies at a URL that fsspec reads, and the copies of it that a host keeps.

Invariant: a copy is whole or not there: it is made beside its place, each file has as many bytes as the file system
said, and then it is renamed. Its name is of the URL and of the version that lay there, so no copy is ever changed. Of
processes that want the same at once one fetches, and the others wait. fsspec is loaded when a URL is read, no sooner.
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
from . import private
from .untrusted_folder import escape

T = TypeVar("T")
_URL = re.compile(r"[a-z][a-z0-9+.-]*://.+", re.DOTALL)
_PIN = re.compile(r"(.+)#([0-9a-f]{16})", re.DOTALL)
# What a file system says of a file that changes with its content, as the kinds of them call it.
_TAGS = {"etag", "last-modified", "lastmodified", "last_modified", "mtime", "modified", "updated", "content-md5"}
# The packages that fsspec reads a kind of URL with, where its name does not say.
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "http": "aiohttp", "https": "aiohttp"}
_PACKAGES |= {"hdfs": "pyarrow", "abfs": "adlfs", "abfss": "adlfs", "az": "adlfs", "oss": "ossfs", "sftp": "paramiko"}
ANSWER = 30.0  # seconds until a file system that says nothing is taken for one that cannot be reached
CACHE = "urls"  # the folder of the copies in this user's cache
KEPT = 30 * 86400.0  # seconds that a copy stays which nobody uses


@dataclass(frozen=True)
class RemoteListing:
    """The files at a URL with their sizes, by their names below it, or one file by its own; and a digest of what the
    file system says of them."""

    files: Mapping[str, int | None]
    version: str


def is_url(text: str) -> bool:
    return _URL.fullmatch(text) is not None


def same(one: str, other: str) -> bool:
    """Whether two paths or URLs name one place; a path is one with its `file://` URL."""
    return _canonical(one) == _canonical(other)


def _canonical(text: str) -> str:
    if is_url(text) and not text.startswith("file://"):
        return text.rstrip("/")
    return str(Path(text.removeprefix("file://")).resolve())


def bare(url: str) -> str:
    """A URL without the version that `pinned` gave it."""
    found = _PIN.fullmatch(url)
    return found[1] if found else url


def name(url: str) -> str:
    """What a file or folder at a URL is called."""
    return PurePosixPath(bare(url).split("?")[0].rstrip("/")).name


def under(url: str, *names: str) -> str:
    return "/".join((bare(url).rstrip("/"), *names))


def home() -> Path:
    """Where the copies of this host lie."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "msrl_graph" / CACHE


def opened(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the URL as that names it. Raises what `told` tells."""
    import fsspec

    fs, path = fsspec.core.url_to_fs(bare(url))
    fs.invalidate_cache()
    return fs, path


@contextmanager
def told(url: str, span: Span = NOWHERE) -> Iterator[None]:
    """What goes wrong at a URL, as a Fault at the line that names it."""
    try:
        yield
    except Fault:
        raise
    except Exception as error:  # each file system raises what its library does
        raise Fault(_why(bare(url), error, span)) from None


def _why(url: str, error: Exception, span: Span) -> Diagnostic:
    protocol = url.partition("://")[0]
    if isinstance(error, ImportError):
        help = f"pip install {_PACKAGES[protocol]}" if protocol in _PACKAGES else f"fsspec says: {error}"
        return Diagnostic("not-installed", f"`{url}` is read with a package that is not installed here", span, help)
    if isinstance(error, ValueError) and "rotocol not known" in str(error):
        from fsspec.registry import known_implementations

        what = f"`{url}` is of no kind that fsspec reads: {protocol}"
        return Diagnostic("bad-value", what, span, nearest(protocol, known_implementations))
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__) or error
    if isinstance(error, PermissionError) or getattr(cause, "status", 0) in (401, 403):
        help = "give the process what the file system asks of who reads, as its package looks for it"
        return Diagnostic("missing-file", f"`{url}` is not for this process to read", span, help)
    if isinstance(error, FileNotFoundError) and (cause is error or getattr(cause, "status", 0) == 404):
        return Diagnostic("missing-file", f"there is nothing at `{url}`", span)
    said = f"{type(cause).__name__}: {cause}".strip(": ").splitlines()[0]
    return Diagnostic("missing-file", f"`{url}` cannot be read: {said}", span)


def look(url: str, folder: bool = False, span: Span = NOWHERE) -> RemoteListing:
    """What lies at a URL, a file or a `folder` (with those in it, one level down). Raises Fault."""
    with told(url, span):
        return _timed(lambda: _looked(url, folder))


def _looked(url: str, folder: bool) -> RemoteListing:
    fs, path = opened(url)
    if folder:
        found = {os.path.relpath(p, path): info for p, info in fs.find(path, maxdepth=2, detail=True).items()}
        found = {n: i for n, i in found.items() if not n.startswith("..")}
        if link := next((n for n, i in found.items() if _leads_out(fs, path, n, i)), ""):
            raise OSError(f"its file {link} is a link that leads out of the folder")
        # What lists a folder may know no sizes, as a page of links does.
        found = {n: i if i.get("size") is not None else fs.info(f"{path.rstrip('/')}/{n}") for n, i in found.items()}
    else:
        found = {name(url): fs.info(path)}
        if found[name(url)]["type"] != "file":
            raise IsADirectoryError(f"{bare(url)} is a folder")
    if not found:
        raise FileNotFoundError(url)
    said = [
        (n, i["size"], *((k, str(v)) for k, v in i.items() if k.lower() in _TAGS)) for n, i in sorted(found.items())
    ]
    version = hashlib.sha256(repr(said).encode()).hexdigest()[:16]
    return RemoteListing({n: i["size"] for n, i in found.items()}, version)


def _leads_out(fs: Any, path: str, file: str, info: Mapping[str, Any]) -> bool:
    """Whether a file of a folder is a link to somewhere else, which a copy would follow. Only of files on this host can
    be said where a link leads to."""
    if "file" in (fs.protocol if isinstance(fs.protocol, tuple) else (fs.protocol,)):
        return escape(Path(path, file), Path(path)) is not None
    return bool(info.get("islink")) or info.get("type") == "link"


def _timed(ask: Callable[[], T]) -> T:
    """An answer that comes in time; a file system may try for minutes."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:
            answer.set_exception(error)

    # Not of a pool, whose threads a process waits for at its end: this one may last.
    Thread(target=run, daemon=True).start()
    try:
        return answer.result(ANSWER)
    except TimeoutError:
        if answer.done():
            raise
        raise TimeoutError(f"no answer within {ANSWER:g} s") from None


def pinned(url: str, folder: bool = False, span: Span = NOWHERE) -> str:
    """A URL with the version that lies there now: a copy of no other is taken for it. Raises Fault."""
    return f"{bare(url)}#{look(url, folder, span).version}"


def copy(url: str, folder: bool = False, only: Sequence[str] = (), span: Span = NOWHERE) -> Path:
    """The copy on this host of a file or a folder at a URL, of a folder those files alone that are named in `only`
    where some are; it is fetched where there is none. Raises Fault."""
    pin = _PIN.fullmatch(url)
    if pin and (known := _place(url, pin[2], only)).is_dir():
        return _used(known, url, folder)
    there = look(url, folder, span)
    if pin and pin[2] != there.version:
        what = f"what lies at `{pin[1]}` has changed since the run was started"
        raise Fault(Diagnostic("missing-file", what, span, "start the run again"))
    place = _place(url, there.version, only)
    files = {n: size for n, size in there.files.items() if not only or n in only}
    with _alone(place, span), told(url, span):
        if not place.is_dir():
            _sweep()
            fetch(url if folder else under(url).rpartition("/")[0], files, place)
    return _used(place, url, folder)


def fetch(url: str, files: Mapping[str, int | None], place: Path) -> None:
    """Fetches files below a URL into a new folder, which is there when all of them are. Raises what `told` tells."""
    fs, path = opened(url)
    partial = Path(tempfile.mkdtemp(prefix=f"{place.name}.", dir=place.parent))
    try:
        for file, size in files.items():
            target = partial / file
            target.parent.mkdir(parents=True, exist_ok=True)
            fs.get_file(f"{path.rstrip('/')}/{file}", str(target))
            if size is not None and (got := target.stat().st_size) != size:
                raise OSError(f"of {file} came {got} bytes of {size}")
        partial.chmod(0o755)
        with suppress(OSError):  # where there are no locks, another process may have been first
            partial.rename(place)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def names(url: str) -> list[str]:
    """What a folder at a URL holds; nothing where there is none. Raises what `told` tells."""
    fs, path = opened(url)
    try:
        return sorted({PurePosixPath(p.rstrip("/")).name for p in fs.ls(path, detail=False) if p.rstrip("/") != path})
    except FileNotFoundError:
        return []


def send(folder: Path, url: str, some: Sequence[str], whole: bool = False) -> None:
    """Puts files of a folder, and folders with all in them, below a URL, those that are there; `whole`: each has its
    name when all of it is there, which costs some file systems a copy. Raises OSError, whatever goes wrong."""
    try:
        fs, path = opened(url)
        for file in (
            f
            for n in some
            for f in (sorted((folder / n).rglob("*")) or [folder / n])
            if f.is_file() and not f.is_symlink()
        ):
            target = PurePosixPath(file.relative_to(folder))
            above = "/".join((path.rstrip("/"), *target.parts[:-1]))
            fs.makedirs(above, exist_ok=True)
            put = f"{above}/.{target.name}" if whole else f"{above}/{target.name}"
            fs.put_file(str(file), put)
            if whole:
                fs.mv(put, f"{above}/{target.name}")
    except Exception as error:
        raise OSError(_unwritable(url, error).message) from None


def remove(url: str, some: Sequence[str]) -> None:
    """Removes files and folders below a URL, those that are there. Raises OSError."""
    try:
        fs, path = opened(url)
        for target in (f"{path.rstrip('/')}/{n}" for n in some):
            if fs.exists(target):
                fs.rm(target, recursive=True)
    except Exception as error:
        raise OSError(_unwritable(url, error).message) from None


def writable(url: str) -> None:
    """Raises Fault where nothing can be put at a URL."""

    protocol = url.partition("://")[0]

    def attempt() -> None:
        if protocol in ("http", "https"):
            raise NotImplementedError  # few servers take files, and none lets them be listed and removed
        fs, path = opened(url)
        folder = path.rstrip("/")
        bucket = path.partition("/")[0]
        if bucket and not fs.exists(bucket):  # which making a folder in it would make
            raise FileNotFoundError(f"there is no {bucket}")
        made = not fs.exists(folder)
        fs.makedirs(folder, exist_ok=True)
        target = f"{folder}/.{uuid.uuid4().hex}"
        fs.pipe_file(target, b"")
        fs.rm_file(target)
        if made:
            with suppress(OSError):  # where folders are but parts of names
                fs.rmdir(folder)

    try:
        _timed(attempt)
    except NotImplementedError:
        what = f"nothing can be written at `{url}`: what is at {protocol}:// is only read"
        raise Fault(Diagnostic("bad-value", what, help="name another with --out")) from None
    except Exception as error:
        raise Fault(_unwritable(url, error)) from None


def _unwritable(url: str, error: Exception) -> Diagnostic:
    found = _why(bare(url), error, NOWHERE)
    what = f"nothing can be written at `{bare(url)}`: {type(error).__name__}: {error}"
    return found if found.code != "missing-file" else Diagnostic("bad-value", what, help="name another with --out")


def _place(url: str, version: str, only: Sequence[str]) -> Path:
    of = hashlib.sha256("\n".join((bare(url).rstrip("/"), *only)).encode()).hexdigest()[:16]
    return home() / f"{of}-{version}"


def _used(place: Path, url: str, folder: bool) -> Path:
    with suppress(OSError):
        os.utime(place)
    return place if folder else place / name(url)


@contextmanager
def _alone(place: Path, span: Span) -> Iterator[None]:
    """No other process of this host makes the same copy meanwhile."""
    try:
        private.cache(CACHE)
        if os.path.lexists(place):
            private.check_folder(place, private.WRITE)
        handle = os.open(place.with_name(f"{place.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        what = f"no copy of what lies at a URL can be kept in {place.parent}: {error.strerror or error}"
        help = "name a folder of your own that can be written to: XDG_CACHE_HOME"
        raise Fault(Diagnostic("missing-file", what, span, help)) from None
    try:
        with suppress(OSError):  # a file system without locks: then each fetches
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _sweep() -> None:
    """Removes what nobody has used for long: copies, and what was left of processes that were killed."""
    for path in home().iterdir():
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > KEPT:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
