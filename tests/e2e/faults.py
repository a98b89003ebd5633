"""What the tests of faults share: the commands that are disturbed, how each must end, and what it must not leave.

A command is added to COMMANDS; every test of faults then disturbs it too. docs/testing.md is their table.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from processes import PATIENCE_S
from seeds import ALL

MARK = "OALLAMA_TEST_OF_FAULTS"  # in the environment of a command and of all that it starts
TIMEOUT_S = 150.0  # a busy machine takes its time

COMMANDS = {
    "profile": "profile {model} --device none -t 1 --tokens 1 --json",
    "plan": "plan {model} --device cpu-pair -t 1 -p 16 -n 4 --profile {profile} -o plan.json",
    "run": "run {model} -p hi -n 4 --temp 0 --device rpc-worker:1 -t 1 --profile {profile} --policy layers",
    "bench": "bench {model} --device none -t 1 --arms stock-cpu,cpu -p 8 -n 0 -r 2 -o bench.json",
    "chat": "chat {model} -n 4 --temp 0 --device rpc-worker:1 -t 1 --profile {profile} --policy layers",
    "serve": "serve {model} --port 0 --llama-server {server} --device rpc-worker:1 -t 1 -p 16 -n 4"
    " --profile {profile} --policy layers",
    "tune": "tune {model} --device cpu-pair -t 1 -p 16 -n 4 --time 1 --profile {profile} --json",
}
"""By name; `run` and `serve` stand for all where not everything is tested. `tune` is the gate, which `run` passes too
with `--tune before`. `chat` reads MESSAGES; `serve` is over the stand-in for llama-server and goes on until it is told
to end, which `must_end` does once it answers."""

if not ALL:
    COMMANDS = {name: COMMANDS[name] for name in ("run", "serve")}

MESSAGES = "hi\nand now?\n"
HALF_WRITTEN = re.compile(r"\..+\.\d+\.[0-9a-f]{8}")  # of core/files.py


@dataclass
class Place:
    """A model, a profile, a stand-in for llama-server, and a folder of its own with a cache, that commands run in."""

    model: Path
    profile: Path
    server: Path
    folder: Path
    started: list[Started] = field(default_factory=list)

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    @property
    def temporary(self) -> Path:
        return self.folder / "temporary"

    def start(
        self,
        name: str,
        cache: Path | None = None,
        shell: str = "",
        before: Callable[[], Any] | None = None,
        command: str = "",
        **names: str,
    ) -> Started:
        """Start a command. shell: redirections in sh's words, in place of pipes. before: called in the child. command:
        in place of that of COMMANDS; names: what it names beside the place's own."""
        places = {"model": self.model, "profile": self.profile, "server": self.server, **names}
        words = [sys.executable, "-m", "oallama", *(command or COMMANDS[name]).format(**places).split()]
        if shell:
            words = ["sh", "-c", f'exec "$@" {shell}', "sh", *words]
        mark = uuid.uuid4().hex
        with (self.model.with_name("messages") if name == "chat" else Path(os.devnull)).open() as messages:
            process = subprocess.Popen(
                words,
                cwd=self.folder,
                stdin=messages,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",  # what a model of random weights says
                env={
                    **os.environ,
                    MARK: mark,
                    "OALLAMA_CACHE_DIR": str(cache or self.cache),
                    "TMPDIR": str(self.temporary),
                },
                preexec_fn=before,
            )
        self.started.append(Started(name, process, mark))
        return self.started[-1]

    def start_all(self, leave_out: Collection[str] = (), **options: Any) -> list[Started]:
        return [self.start(name, **options) for name in COMMANDS if name not in leave_out]

    def must_hold_whole_files(self) -> None:
        """Once all have ended."""
        for path in self.folder.rglob("*"):
            assert not HALF_WRITTEN.fullmatch(path.name), path
            if path.suffix == ".json":
                json.loads(path.read_text(encoding="utf-8"))

    def must_hold_nothing_temporary(self) -> None:
        """Once all have ended, and none was killed."""
        assert list(self.temporary.iterdir()) == []

    def close(self) -> None:
        for one in self.started:
            for process in one.family():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            one.process.communicate()


@dataclass
class Started:
    """A command under way."""

    name: str
    process: subprocess.Popen[str]
    mark: str
    signalled: bool = False
    told_to_end: bool = False

    def signal(self, number: signal.Signals) -> None:
        self.signalled = True
        self.process.send_signal(number)

    def end(self) -> None:
        """Tell a server to end, once it answers or has ended by itself; other commands end by themselves."""
        if self.name == "serve" and not self.signalled:
            self.until(lambda: _answers(self.process.pid))
            self.signal(signal.SIGTERM)
            self.told_to_end = True

    @property
    def code(self) -> int:
        """Its exit code; 0 where it was told to end and did."""
        code: int = self.process.returncode
        return 0 if self.told_to_end and code == 128 + signal.SIGTERM else code

    def family(self) -> list[psutil.Process]:
        """The command and whatever it has started that still runs, also what left its session."""
        return [process for process in psutil.process_iter() if _mark_of(process) == self.mark]

    def children(self) -> list[psutil.Process]:
        return [process for process in self.family() if process.pid != self.process.pid]

    def until(self, holds: Callable[[], Any]) -> Any:
        """Wait for it; None where the command ended first."""
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                return None
            if found := holds():
                return found
            time.sleep(0.01)
        raise AssertionError(f"{self.name} goes on and nothing happens")

    def until_ready(self) -> Any:
        """Wait until the command handles signals itself: what comes before is the interpreter's."""
        return self.until(lambda: handles(self.process.pid, signal.SIGTERM))

    def must_end(self, *codes: int, by_itself: str = "") -> tuple[int, str]:
        """Its exit code, one of these, and its stderr: one sentence that says what failed. It has left nothing.
        by_itself: what the C library says where it ends a process that has no word in it."""
        self.end()
        _, said = self.process.communicate(timeout=TIMEOUT_S)
        code = self.code
        told = f"{self.name} ended with {code} and said:\n{said}"
        if by_itself and code and by_itself in said:
            self.must_leave_nothing()
            return code, said
        assert code in codes, told
        assert "Traceback" not in said and "Exception ignored" not in said and "internal error" not in said, told
        if code:
            assert said.splitlines()[-1].startswith("oallama: "), told
        self.must_leave_nothing()
        return code, said

    def must_leave_nothing(self) -> None:
        """No process."""
        deadline = time.monotonic() + PATIENCE_S
        while (left := self.family()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left, f"{self.name} left {left}"


def _mark_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get(MARK) if process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.Error:
        return None


def _answers(pid: int) -> bool:
    """Whether the placement page of this process says that llama-server is ready, or has no memory for a thread that
    could say so."""
    with contextlib.suppress(psutil.Error, OSError, http.client.HTTPException):
        for connection in psutil.Process(pid).net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                page = f"http://127.0.0.1:{connection.laddr.port}/placement"
                try:
                    with urllib.request.urlopen(page, timeout=5) as answer:
                        return bool(json.load(answer)["state"]["phase"] == "ready")
                except http.client.RemoteDisconnected:
                    return True
    return False


def handles(pid: int, number: signal.Signals) -> bool:
    try:
        caught = Path(f"/proc/{pid}/status").read_text().split("SigCgt:")[1].split()[0]
    except (OSError, IndexError):
        return False
    return bool(int(caught, 16) >> (number - 1) & 1)


def places(tmp: Path) -> Iterator[Place]:
    """For a fixture: a place, and an end of all that was started in it."""
    from e2e.described_card import slow_cpu_fast_card
    from e2e.stub import stub_program
    from gguf_factory import write_llama_shape

    from oallama.profile.store import profile_to_json

    model = write_llama_shape(tmp / "model.gguf", 2, 256, 512, 4, 2, 300)
    profile = tmp / "profile.json"
    profile.write_text(json.dumps(profile_to_json(slow_cpu_fast_card(model, 1e9))))
    (tmp / "messages").write_text(MESSAGES)
    folder = tmp / "work"
    folder.mkdir()
    place = Place(model, profile, stub_program(tmp), folder)
    place.temporary.mkdir()
    yield place
    place.close()
