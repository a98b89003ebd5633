"""Runs a module in a child process, so that a crash of native code is an exception here and not the end of us.

Protocol: a request is one line of JSON on the child's stdin. The answer is JSON lines on a pipe of its own (its number
is in GGML_BRIDGE_CHILD_FD): any number of {"progress": {...}}, then one {"result": {...}} or
{"error": {"type": ..., "message": ...}}. stdout and stderr stay free for whatever native code prints. The child ends
when its stdin does.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import IO, Any

import ggml_bridge.errors as errors
from ggml_bridge.errors import BridgeError, ChildDied, ChildTimeout

FD_VARIABLE = "GGML_BRIDGE_CHILD_FD"
PARENT_VARIABLE = "GGML_BRIDGE_PARENT_PID"

Message = dict[str, Any]
Handler = Callable[[Message, Callable[[Message], None]], Message]

_STDERR_TAIL_BYTES = 8192
_PIPE_BYTES = 1 << 16  # that a pipe of Linux holds
_PATIENCE_S = 2.0  # between asking a child to end and killing it

_PR_SET_PDEATHSIG = 1

_WITHOUT_FOLDER = (
    "import sys; sys.path[:1] == [''] and sys.path.pop(0); del sys.argv[:2]; import runpy; "
    "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)
_SAFE_PATH = ("-P",) if sys.version_info >= (3, 11) else ("-c", _WITHOUT_FOLDER)


class ChildError(BridgeError):
    """The child reported an error of a type that is not one of ours; `type_name` is the name of that type."""

    def __init__(self, type_name: str, message: str) -> None:
        self.type_name = type_name
        super().__init__(message)


#
# the parent's side
#


def python_module(module: str) -> list[str]:
    """The command line of `python -m module`, with nothing imported from the working directory: that is the user's, and
    may hold a json.py of anybody's."""
    return [sys.executable, *_SAFE_PATH, "-m", module]


def run_in_child(
    module: str,
    request: Mapping[str, Any],
    on_progress: Callable[[Message], None] | None = None,
    timeout_s: float | None = None,
    env: Mapping[str, str | None] | None = None,
) -> Message:
    """Runs `python -m module` with one request and returns its result.

    The child ends when anything is raised here (Ctrl-C too, which is passed on to it and then raised again). Raises as
    Child.ask.
    """
    child = Child(module, env)
    try:
        result = child.ask(request, on_progress, timeout_s)
    except KeyboardInterrupt:
        child.end(signal.SIGINT)
        raise
    except BaseException:
        child.end(signal.SIGTERM)
        raise
    child.end()
    return result


def _file_without_a_name() -> IO[bytes]:
    """A file in memory, which needs no folder that can be written to; a temporary one where the system has none."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("stderr"), "w+b")
    return tempfile.TemporaryFile()


class Child:
    """`python -m module` in a process of its own, which answers one request at a time and idles in between.

    module: one whose main part calls `child_main(handler)`. env: variables to add to its environment; None takes one
    out. It dies when the thread that made it dies. Its stderr goes into a file: a pipe would have to be read all along.
    """

    def __init__(self, module: str, env: Mapping[str, str | None] | None = None) -> None:
        self._module = module
        self._stderr = _file_without_a_name()
        read_fd, write_fd = os.pipe()
        variables = {
            **os.environ,
            **(env or {}),
            FD_VARIABLE: str(write_fd),
            PARENT_VARIABLE: str(os.getpid()),
        }
        try:
            self._process = subprocess.Popen(
                python_module(module),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                pass_fds=(write_fd,),
                env={name: value for name, value in variables.items() if value is not None},
                start_new_session=True,  # the terminal's Ctrl-C comes to us, and we pass it on
                bufsize=0,  # or what a child does not read would be written once more when its stdin is closed
            )
        except BaseException:
            os.close(read_fd)
            self._stderr.close()
            raise
        finally:
            os.close(write_fd)
        assert self._process.stdin is not None
        self._requests = self._process.stdin
        os.set_blocking(self._requests.fileno(), False)
        self._answers = os.fdopen(read_fd, "rb", buffering=0)
        self._received = b""  # of the answers, and not looked at

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """How it ended, as subprocess.Popen has it; None while it runs."""
        return self._process.poll()

    def ask(
        self,
        request: Mapping[str, Any],
        on_progress: Callable[[Message], None] | None = None,
        timeout_s: float | None = None,
    ) -> Message:
        """Return the handler's result for a request. on_progress is called in this thread for each progress message.

        Raises ChildDied when it ends without an answer, ChildTimeout, the same ValueError or BridgeError that the
        handler raised, and ChildError for anything else that it raised.
        """
        self.send(request)
        return self.answer(on_progress, timeout_s)

    def send(self, request: Mapping[str, Any]) -> None:
        """Give it a request and do not wait. Requests are answered in order."""
        left = memoryview(json.dumps(request).encode() + b"\n")
        with contextlib.suppress(BrokenPipeError):  # a child that died already tells why when it is asked for an answer
            while left:
                _is_ready(self._requests, selectors.EVENT_WRITE)
                left = left[self._requests.write(left) or 0 :]

    def answer(self, on_progress: Callable[[Message], None] | None = None, timeout_s: float | None = None) -> Message:
        """The answer to the first request that has none yet. As ask."""
        answer = self._receive(on_progress, timeout_s)
        if answer is None:
            self.end()
            raise ChildDied(self._module, self._process.returncode, self._stderr_tail.decode(errors="replace"))
        return _unpack(answer)

    def _receive(self, on_progress: Callable[[Message], None] | None, timeout_s: float | None) -> Message | None:
        """The next message that is no progress, or None when the child closed its pipe without one."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            line, end, rest = self._received.partition(b"\n")
            if end:
                self._received = rest
                message: Message = json.loads(line)
                if "progress" not in message:
                    return message
                if on_progress is not None:
                    on_progress(message["progress"])
                continue
            if not _is_ready(self._answers, selectors.EVENT_READ, deadline):
                raise ChildTimeout(f"the child process {self._module} gave no answer within {timeout_s:g} s")
            chunk = os.read(self._answers.fileno(), _PIPE_BYTES)
            if not chunk:
                return None
            self._received += chunk

    def end(self, first: signal.Signals | None = None) -> None:
        """Let it end by itself, or send it a signal first; kill it when that takes too long. May be called twice."""
        with contextlib.suppress(OSError):
            self._requests.close()
        if first is not None:
            self._process.send_signal(first)
        try:
            self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()
        if not self._stderr.closed:
            size = self._stderr.seek(0, os.SEEK_END)
            self._stderr.seek(max(0, size - _STDERR_TAIL_BYTES))
            self._stderr_tail = self._stderr.read()
            self._stderr.close()


def _is_ready(pipe: IO[bytes], events: int, deadline: float | None = None) -> bool:
    """Wait for a pipe, no longer than until the deadline (of time.monotonic)."""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, events)
        return bool(selector.select(None if deadline is None else max(0.0, deadline - time.monotonic())))


def _unpack(answer: Message) -> Message:
    error = answer.get("error")
    if error is None:
        result: Message = answer["result"]
        return result
    if error["type"] == "ValueError":
        raise ValueError(error["message"])
    kind = getattr(errors, error["type"], None)
    if isinstance(kind, type) and issubclass(kind, BridgeError) and kind is not ChildDied:
        raise kind(error["message"])
    raise ChildError(error["type"], error["message"])


#
# the child's side
#


def child_main(handler: Handler, prepare: Callable[[], object] = lambda: None) -> None:
    """Answer the requests of a Child, until it has no more: `handler(request, progress)` returns the result.

    prepare: loads what the handler will need anyway, while the parent may not know yet what to ask; the handler meets
    its exceptions again. The parent gets the handler's exception by type name and message. Call it from a module's main
    part.
    """
    die_with_parent()
    fd = int(os.environ.pop(FD_VARIABLE))
    os.set_inheritable(fd, False)
    with os.fdopen(fd, "w", encoding="utf-8") as answers:

        def send(message: Message) -> None:
            answers.write(json.dumps(message) + "\n")
            answers.flush()

        try:
            with contextlib.suppress(Exception):
                prepare()
            for line in sys.stdin.buffer:
                try:
                    send({"result": handler(json.loads(line), lambda progress: send({"progress": progress}))})
                except Exception as error:
                    send({"error": {"type": type(error).__name__, "message": str(error)}})
        except KeyboardInterrupt:
            os._exit(130)
    # native libraries may crash in their destructors; every answer is given, so skip them
    sys.stderr.flush()
    os._exit(0)


def die_with_parent() -> None:
    """Asks Linux to kill this process when the thread that started it ends; leaves at once if it has ended already."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is not None and os.getppid() != int(parent):
        os._exit(1)
