"""Chat templates, rendered in a process of their own.

Invariant: a template is a program that came with a model. Whatever it does, it is ended after SECONDS of a processor
for one conversation, gets MEMORY bytes more than its process has, and writes no more text than `most_text` allows. Its
process is started for the first messages and serves all folders. What goes to it is pickled; what comes from it is only
text.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import weakref
from contextlib import suppress
from functools import cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from threading import Lock
from typing import Any, Literal

from ...data.chat import Messages
from ..process import shipped_files
from ..process.resource_limits import bound_data, unbound_data

SECONDS = 3.0  # of a processor, for one conversation: real templates take some milliseconds
MEMORY = 512 << 20  # bytes beyond what the process takes anyway
SLACK = 1 << 16  # characters that a template may write of its own
FACTOR = 64  # characters that it may write for each character of the conversation
PATIENCE = 600.0  # seconds until a process that says nothing is given up: its imports take some on a busy machine
FILES = ("chat_template.jinja", "chat_template.json")  # which a template is in, if not in the tokenizer's config
PROGRAM = "msrl_graph.runtime.data.rendering"

Kind = Literal["render", "template", "tools"]


class BadMessages(ValueError):
    """Messages that the chat template of a model's folder does not render; says why, and perhaps what to do."""

    def __init__(self, what: str, help: str = "") -> None:
        super().__init__(what)
        self.help = help


def render(folder: str, messages: Messages, prompt: bool, more: dict[str, Any]) -> str:
    """The text of messages, with what asks for a response after them where it is a `prompt`; `more` is for the
    template, as `tools`. Raises BadMessages."""
    return _asked("render", folder, (messages, prompt, more))


@cache
def template(folder: str) -> str | dict[str, str] | None:
    """The chat template of a model's folder: one text, or several by name, or None. Raises BadMessages."""
    found: str | dict[str, str] | None = json.loads(_asked("template", folder))
    return found


@cache
def takes_tools(folder: str) -> bool:
    """Whether the template that is taken where there are tools does anything with them. Raises BadMessages."""
    return bool(json.loads(_asked("tools", folder)))


def most_text(messages: Messages, more: dict[str, Any]) -> int:
    """The most characters that a template may write for a conversation."""
    return SLACK + FACTOR * len(json.dumps([messages, more], default=str))


def with_tools(templates: str | dict[str, str] | None) -> str:
    """The template that is taken where there are tools."""
    found = templates.get("tool_use", templates.get("default", "")) if isinstance(templates, dict) else templates
    return str(found or "")


def _asked(kind: Kind, folder: str, given: Any = None) -> str:
    place = shipped_files.found(folder)
    answer, text = _process().ask((kind, str(place), given))
    if answer == "fine":
        return text
    file = next((name for name in FILES if (place / name).is_file()), "tokenizer_config.json")
    whose = f"the chat template of {folder}, in its {file},"
    if answer == "load":
        raise BadMessages(f"the tokenizer of {folder} cannot be loaded: {text}")
    if answer == "bound":
        raise BadMessages(f"{whose} {text}: it is stopped there")
    raise BadMessages(f"{whose} does not render them: {text}")


class _Process:
    """The process that renders, started again after a template that it was ended for."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.line: Connection | None = None
        self.program: subprocess.Popen[bytes] | None = None

    def ask(self, asked: Any) -> tuple[str, str]:
        """Return what came of it (fine, load, error or bound) and the text."""
        with self.lock:
            line, program = self._there()
            try:
                line.send_bytes(pickle.dumps(asked))
                if not line.poll(PATIENCE):
                    program.kill()
                answer = line.recv_bytes().decode("utf-8", "surrogatepass")
            except (EOFError, OSError):
                self._end()
                return "bound", _reason(program.returncode)
            kind, _, text = answer.partition("\n")
            return kind, text

    def _there(self) -> tuple[Connection, subprocess.Popen[bytes]]:
        if self.line is None or self.program is None or self.program.poll() is not None:
            self.line, there = Pipe()
            self.program = subprocess.Popen(
                [sys.executable, "-P", "-m", PROGRAM, str(there.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[there.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "HF_HUB_OFFLINE": "1"},
                start_new_session=True,
            )
            there.close()
            weakref.finalize(self.line, _reap, self.program)
        return self.line, self.program

    def _end(self) -> None:
        if self.program is not None:
            self.program.kill()
            self.program.wait()
        self.line = None


def _reap(program: subprocess.Popen[bytes]) -> None:
    """The line is closed or about to be: the process has nobody left to answer."""
    program.kill()
    program.wait()


@cache
def _process() -> _Process:
    return _Process()


def _reason(status: int | None) -> str:
    if status == -signal.SIGPROF:
        return f"takes more than {SECONDS:g} s of a processor for one conversation"
    if status is not None and status < 0:
        return f"ended its process by {signal.Signals(-status).name}"
    return f"ended its process with status {status}"


# The process itself.


def main() -> None:
    """Answer until nobody asks any more."""
    line = Connection(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, meant for the run
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, in the middle of whatever it does
    with suppress(EOFError, OSError):
        while True:
            kind, folder, given = pickle.loads(line.recv_bytes())
            line.send_bytes("\n".join(_answer(kind, folder, given)).encode("utf-8", "surrogatepass"))
    os._exit(0)


def _answer(kind: Kind, folder: str, given: Any) -> tuple[str, str]:
    try:
        chat = _chat(folder)
    except (OSError, ValueError) as error:
        return "load", str(error)
    if kind == "template":
        return "fine", json.dumps(chat.chat_template)
    bound_data(MEMORY)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        if kind == "tools":
            return "fine", json.dumps(_takes_tools(with_tools(chat.chat_template)))
        messages, prompt, more = given
        text: str = chat.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt, **more)
        if len(text) > (most := most_text(messages, more)):
            return "bound", f"writes {len(text):,} characters, more than {most:,} for one conversation"
        return "fine", text
    except MemoryError:
        return "bound", f"needs more than {MEMORY >> 20} MiB of memory for one conversation"
    except Exception as error:  # a template is a program, which may raise anything
        return "error", str(error)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        unbound_data()


@cache
def _chat(folder: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def _takes_tools(source: str) -> bool:
    from jinja2 import meta
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols", "jinja2.ext.do"])
    # What transformers adds to templates to mark what an assistant writes, which jinja2 alone does not know.
    plain = source.replace("endgeneration", "endif").replace("% generation", "% if true")
    return "tools" in meta.find_undeclared_variables(environment.parse(plain))


if __name__ == "__main__":
    main()
