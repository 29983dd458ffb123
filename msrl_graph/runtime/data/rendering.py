"""Chat templates, rendered in a separate process.

Invariant: a template is a program that comes with a model, so its resources are limited. For one conversation, a
template is stopped after SECONDS of CPU time, can allocate MEMORY bytes beyond the memory that its process already
uses, and may write no more text than `most_text` allows. The process starts with the first request and renders the
templates of all model folders. Requests to the process are pickled; its replies are only text.
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
from ..process.resource_limits import limit_data, unlimit_data

SECONDS = 3.0  # of CPU time, for one conversation: real templates take a few milliseconds
MEMORY = 512 << 20  # bytes in addition to the memory of the process
SLACK = 1 << 16  # characters that a template may write for any conversation
FACTOR = 64  # more characters that it may write for each character of the conversation
PATIENCE = 600.0  # seconds without a reply until the process is killed: its imports are slow on a busy machine
FILES = ("chat_template.jinja", "chat_template.json")  # in addition to tokenizer_config.json
PROGRAM = "msrl_graph.runtime.data.rendering"

Kind = Literal["render", "template", "tools"]


class BadMessages(ValueError):
    """Messages that a model's chat template cannot render.

    The error has the reason and, in some cases, the text `help`, which says what to do.
    """

    def __init__(self, message: str, help: str = "") -> None:
        super().__init__(message)
        self.help = help


def render(folder: str, messages: Messages, prompt: bool, more: dict[str, Any]) -> str:
    """Render messages as text with the chat template of the model in `folder`.

    If `prompt` is true, the text that asks for a response is appended. `more` has further template variables, such as
    `tools`. Raises BadMessages.
    """
    return _request("render", folder, (messages, prompt, more))


@cache
def template(folder: str) -> str | dict[str, str] | None:
    """Return the chat template of the model in `folder`.

    The result is one text, several texts by name, or None. Raises BadMessages.
    """
    template_or_templates: str | dict[str, str] | None = json.loads(_request("template", folder))
    return template_or_templates


@cache
def takes_tools(folder: str) -> bool:
    """Return whether the model's chat template for tools uses the variable `tools`.

    `folder` is the folder of the model. Raises BadMessages.
    """
    return bool(json.loads(_request("tools", folder)))


def most_text(messages: Messages, more: dict[str, Any]) -> int:
    """Return the largest number of characters that a chat template may write.

    The number depends on the length of the conversation.
    """
    return SLACK + FACTOR * len(json.dumps([messages, more], default=str))


def tools_template(templates: str | dict[str, str] | None) -> str:
    """Return the chat template that is used for a conversation with tools.

    A model has one template, several templates by name, or none.
    """
    source = templates.get("tool_use", templates.get("default", "")) if isinstance(templates, dict) else templates
    return str(source or "")


def _request(kind: Kind, folder: str, arguments: Any = None) -> str:
    model_folder = shipped_files.find_copy(folder)
    answer, text = _process().ask((kind, str(model_folder), arguments))
    if answer == "fine":
        return text
    file = next((name for name in FILES if (model_folder / name).is_file()), "tokenizer_config.json")
    subject = f"the chat template of {folder}, in its {file},"
    if answer == "load":
        raise BadMessages(f"the tokenizer of {folder} cannot be loaded: {text}")
    if answer == "bound":
        raise BadMessages(f"{subject} {text}: it was stopped")
    raise BadMessages(f"{subject} does not render them: {text}")


class _Process:
    """The rendering process; if it has died, the next request starts it again."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.line: Connection | None = None
        self.program: subprocess.Popen[bytes] | None = None

    def ask(self, request: Any) -> tuple[str, str]:
        """Send a request to the process; return the request's outcome and a text.

        The outcome is "fine" (the text is the answer), "load" (the tokenizer cannot be loaded), "error" (the template
        failed) or "bound" (the template exceeded a limit).
        """
        with self.lock:
            line, program = self._connect()
            try:
                line.send_bytes(pickle.dumps(request))
                if not line.poll(PATIENCE):
                    program.kill()
                answer = line.recv_bytes().decode("utf-8", "surrogatepass")
            except (EOFError, OSError):
                self._kill()
                return "bound", _describe_exit(program.returncode)
            kind, _, text = answer.partition("\n")
            return kind, text

    def _connect(self) -> tuple[Connection, subprocess.Popen[bytes]]:
        if self.line is None or self.program is None or self.program.poll() is not None:
            self.line, other_end = Pipe()
            self.program = subprocess.Popen(
                [sys.executable, "-P", "-m", PROGRAM, str(other_end.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[other_end.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "HF_HUB_OFFLINE": "1"},
                start_new_session=True,
            )
            other_end.close()
            weakref.finalize(self.line, _reap, self.program)
        return self.line, self.program

    def _kill(self) -> None:
        if self.program is not None:
            self.program.kill()
            self.program.wait()
        self.line = None


def _reap(program: subprocess.Popen[bytes]) -> None:
    """Kill the rendering process `program`, to which no connection remains."""
    program.kill()
    program.wait()


@cache
def _process() -> _Process:
    return _Process()


def _describe_exit(status: int | None) -> str:
    if status == -signal.SIGPROF:
        return f"takes more than {SECONDS:g} s of CPU time for one conversation"
    if status is not None and status < 0:
        return f"ended its process by signal {signal.Signals(-status).name}"
    return f"ended its process with status {status}"


# Code of the process itself.


def main() -> None:
    """Run the rendering process: answer requests until the connection is closed."""
    line = Connection(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is meant for the run
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process at any point
    # A template does not need torch. Without torch, transformers is imported in half the time, but prints a warning.
    sys.modules["torch"] = None  # type: ignore[assignment]
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    with suppress(EOFError, OSError):
        while True:
            kind, folder, arguments = pickle.loads(line.recv_bytes())
            line.send_bytes("\n".join(_answer(kind, folder, arguments)).encode("utf-8", "surrogatepass"))
    os._exit(0)


def _answer(kind: Kind, folder: str, arguments: Any) -> tuple[str, str]:
    try:
        chat = _chat(folder)
    except (OSError, ValueError) as error:
        return "load", str(error)
    if kind == "template":
        return "fine", json.dumps(chat.chat_template)
    limit_data(MEMORY)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        if kind == "tools":
            return "fine", json.dumps(_takes_tools(tools_template(chat.chat_template)))
        messages, prompt, more = arguments
        text: str = chat.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt, **more)
        if len(text) > (limit := most_text(messages, more)):
            return "bound", f"writes {len(text):,} characters, more than {limit:,} for one conversation"
        return "fine", text
    except MemoryError:
        return "bound", f"needs more than {MEMORY >> 20} MiB of memory for one conversation"
    except Exception as error:  # a template is a program, which may raise anything
        return "error", str(error)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        unlimit_data()


@cache
def _chat(folder: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def _takes_tools(source: str) -> bool:
    from jinja2 import meta
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols", "jinja2.ext.do"])
    # transformers adds this tag to templates to mark the assistant's text; jinja2 alone does not know it.
    plain = source.replace("endgeneration", "endif").replace("% generation", "% if true")
    return "tools" in meta.find_undeclared_variables(environment.parse(plain))


if __name__ == "__main__":
    main()
