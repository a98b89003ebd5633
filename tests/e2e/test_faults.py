"""What goes wrong outside a command, and how the command ends; docs/testing.md is the table of it.

Each fault disturbs every command of COMMANDS, or two of them where not everything is tested. A command ends with an
exit code that docs/cli.md names, a failed one in one sentence; it leaves no process and no half-written file.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
from e2e.cut_proxy import cut_proxy
from e2e.described_card import profile_file, slow_cpu_fast_card
from e2e.logits import QUANTISED_NMSE, TOKENS, nmse, placed_logits, stock_logits
from e2e.stock import free_port
from e2e.stub import stub_program
from gguf_factory import write_gguf, write_llama_shape
from processes import COMMAND, PATIENCE_S, ROOT, Found, until
from rpc_server import RpcServer
from seeds import ALL, FRESH

from oallama.core.errors import DeviceError
from oallama.device.load_params import load_bridge
from oallama.device.native_abort import RPC_SILENCE_S, sentence_of
from oallama.placer import Placer
from oallama.run.program import PROGRAM_VARIABLE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what a system refuses, and how, is Linux's here")

PLACED = "--temp 0 --profile profile.json --policy layers"
COMMANDS = {
    "profile": "profile model.gguf --tokens 1 --json",
    "plan": "plan model.gguf -p 16 -n 4 --profile profile.json --policy oato -o plan.json",
    "run": f"run model.gguf -p hi -n 4 {PLACED}",
    "bench": "bench model.gguf --arms stock-ngl,layers --profile profile.json -p 8 -n 0 -r 2 -o bench.json",
    "chat": f"chat model.gguf -n 4 {PLACED}",
    "serve": "serve model.gguf --port 0 --placement-port {port} --llama-server bin/llama-server -p 16 -n 4"
    " --profile profile.json --policy layers",
    "tune": "tune model.gguf -p 16 --time 1 --profile profile.json --json",
}
"""`tune` is what `run` does too with `--tune before`. `chat` reads two messages. `serve` keeps a stand-in
for llama-server, and goes on until it is told to end. `run` and `chat` have one where neither memory nor a device
matters."""
if not ALL:
    COMMANDS = {name: COMMANDS[name] for name in ("run", "serve")}
DEVICES = {"profile": "none"}  # by command, else a worker

MARK = "OALLAMA_TEST_OF_FAULTS"  # in the environment of a command and of all that it starts
HALF_WRITTEN = re.compile(r"\..+\.\d+\.[0-9a-f]{8}")  # of core/files.py
LEAST_COMMANDS = 20  # that each command sends to an RPC server
LONGEST_S = 2.0  # of a command, until it is disturbed


@dataclass
class Started:
    """A command under way. page: where a server tells how it is."""

    name: str
    process: subprocess.Popen[str]
    mark: str
    page: str
    signalled: bool = False

    def signal(self, number: signal.Signals) -> None:
        self.signalled = True
        self.process.send_signal(number)

    def family(self) -> list[psutil.Process]:
        """The command and whatever it has started that still runs, also what left its session."""
        return [process for process in psutil.process_iter() if mark_of(process) == self.mark]

    def children(self) -> list[psutil.Process]:
        return [process for process in self.family() if process.pid != self.process.pid]

    def until(self, holds: Callable[[], Found]) -> Found | bool:
        """Wait for it and return what it then is; True where the command ended before."""
        return until(lambda: holds() or self.process.poll() is not None)

    def serves(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            try:
                return bool(httpx.get(self.page, timeout=5).json()["state"]["status"] == "ready")
            except httpx.RemoteProtocolError:  # there is no memory for a thread that could answer
                return True
        return False

    def must_end(self, *codes: int) -> tuple[int, str]:
        """The exit code, one of these, and stderr: one sentence that says what failed. A server that works is told to
        end, which is 0. Nothing it has started runs any more."""
        told_to_end = self.name == "serve" and not self.signalled
        if told_to_end:
            self.until(self.serves)
            self.process.terminate()
        _, said = self.process.communicate(timeout=PATIENCE_S)
        code = self.process.returncode
        if told_to_end and code == 128 + signal.SIGTERM:
            code = 0
        told = f"{self.name} ended with {code} and said:\n{said}"
        assert code in codes, told
        if code and GLIBC not in said:
            assert said.splitlines()[-1].startswith("oallama: "), told
        assert not re.search("Traceback|Exception ignored|internal error", said), told
        until(lambda: not self.family())
        return code, said


def mark_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get(MARK) if process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.Error:
        return None


class Place:
    """A folder with a model, a profile, a stand-in for llama-server and a cache, in which commands are started. real:
    whether `run` and `chat` have llama-server itself."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.started, self.real = folder, list[Started](), ALL
        model = write_llama_shape(folder / "model.gguf", 2, 256, 512, 4, 2, 300)
        profile_file(slow_cpu_fast_card(model, 1e9), folder)
        (folder / "messages").write_text("hi\nand now?\n")
        stub_program(folder)
        self.temporary = folder / "temporary"
        self.temporary.mkdir()

    def start(self, name: str, device: str = "", script: str = 'exec "$@"') -> Started:
        """Start a command by a line of sh, in which "$@" is the command."""
        port, mark = free_port(), uuid.uuid4().hex
        command = COMMANDS[name].format(port=port).split()
        on = ("-t", "1", "--device", device or DEVICES.get(name, "rpc-worker:1"))
        with (self.folder / "messages").open() as messages:
            process = subprocess.Popen(
                ["sh", "-c", script, "sh", *COMMAND, *command, *on],
                cwd=self.folder,
                stdin=messages,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",  # what a model of random weights says
                env={
                    **os.environ,
                    MARK: mark,
                    "OALLAMA_CACHE_DIR": "cache",
                    "TMPDIR": str(self.temporary),
                    **({} if self.real else {PROGRAM_VARIABLE: "bin/llama-server"}),
                },
            )
        self.started.append(Started(name, process, mark, f"http://127.0.0.1:{port}/placement"))
        return self.started[-1]

    def start_all(self, script: str = 'exec "$@"') -> list[Started]:
        return [self.start(name, script=script) for name in COMMANDS]

    def must_hold_whole_files(self) -> None:
        """Once all have ended."""
        for path in self.folder.rglob("*"):
            assert not HALF_WRITTEN.fullmatch(path.name), path
            if path.suffix == ".json":
                json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """A place, and an end of all that was started in it."""
    made = Place(tmp_path)
    yield made
    for started in made.started:
        for process in started.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        started.process.communicate()


@pytest.fixture
def draw(request: pytest.FixtureRequest) -> random.Random:
    print("seed:", FRESH)
    return random.Random(f"{request.node.name} {FRESH}")


#
# what the system refuses
#


@dataclass(frozen=True)
class Refusal:
    """A line of sh in which a command starts. fails: what commands say that cannot do their work then; may_fail: what
    others say that cannot. All others do their work."""

    script: str
    fails: dict[str, str]
    may_fail: str = ""


GLIBC = "cannot allocate memory for thread-local data: ABORT"  # its dynamic linker ends the process, whatever it is
NO_MEMORY = "|".join(  # the last but one are words of libgomp
    (r"out of (host )?memory", "has no room", "failed to allocate", "Thread creation failed", GLIBC)
)
TOO_LITTLE = dict.fromkeys(
    COMMANDS, r"out of memory; use a smaller model, a shorter context \(-c\) or a smaller batch \(-ub\)"
)
UNWRITTEN = "cannot write the result to stdout: it is closed"

REFUSALS = {
    # EFBIG in place of ENOSPC, which only a file system of its own could say
    "full disk": Refusal('ulimit -f 0; exec "$@"', {
        "plan": "File too large", "bench": "File too large",
        **dict.fromkeys(("run", "chat", "serve"), "no writable temporary folder"),
    }),
    "cache that cannot be written": Refusal('exec env OALLAMA_CACHE_DIR=/proc/none "$@"', {}),
    "closed stdout": Refusal('exec "$@" <&- >&-', dict.fromkeys(("profile", "run", "tune"), UNWRITTEN)),
    "closed stderr": Refusal('exec "$@" 2>&-', {}),
    # MiB of address space: numpy and llama.cpp cannot be loaded; some of what a command does is refused, or nothing
    **{f"memory of {mib} MiB": Refusal(f'ulimit -v {mib << 10}; exec "$@"', TOO_LITTLE) for mib in (40, 100)},
    **{f"memory of {mib} MiB": Refusal(f'ulimit -v {mib << 10}; exec "$@"', {}, NO_MEMORY)
       for mib in (160, 185, 210, 235)},
}  # fmt: skip
FEW = ("full disk", "cache that cannot be written", "closed stdout", "closed stderr", "memory of 100 MiB")


@pytest.mark.parametrize("kind", REFUSALS if ALL else (*FEW, "memory of 185 MiB"))
def test_what_is_refused_is_one_sentence(kind: str, place: Place) -> None:
    refusal = REFUSALS[kind]
    place.real = ALL or "memory" in kind
    for started in place.start_all(refusal.script):
        expected = refusal.fails.get(started.name, refusal.may_fail)
        code, said = started.must_end(*((1,) if started.name in refusal.fails else (0, 1) if expected else (0,)))
        assert not code or re.search(expected, said.splitlines()[-1]), f"{started.name} said {said}"
    place.must_hold_whole_files()


@pytest.mark.thorough
def test_a_half_written_cache_and_one_from_the_future_are_measured_again(place: Place) -> None:
    for started in place.start_all():
        started.must_end(0)
    kept = sorted(path for path in (place.folder / "cache").rglob("*") if path.is_file() and path.stat().st_size)
    assert len(kept) > 1
    for path in kept[::2]:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    for path in kept:
        os.utime(path, (4e9, 4e9))  # the clock was set back by a century since
    for started in place.start_all():
        started.must_end(0)
    place.must_hold_whole_files()


#
# processes that are killed, stopped, crowded or moved
#


@pytest.mark.parametrize("name", COMMANDS)
def test_a_killed_child_is_one_sentence(name: str, place: Place, draw: random.Random) -> None:
    """Or no loss at all: what one child could not tell is asked of another."""
    started = place.start(name)
    started.until(started.children)
    for child in started.children()[:1]:
        time.sleep(draw.random() * 0.5)
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    started.must_end(0, 1)
    place.must_hold_whole_files()


def test_children_end_with_a_killed_parent(place: Place) -> None:
    for name in COMMANDS:  # one after the other: the first would be over before the last has children
        started = place.start(name)
        assert started.until(started.children) is not True, f"{name} starts no process"
        started.process.kill()
    for started in place.started:
        until(lambda started=started: not started.family())


def test_commands_at_once_are_suspended_and_moved_to_one_cpu(place: Place) -> None:
    """Two of each, or one, in one cache and one folder; suspended with all that they started, as a laptop sleeps."""
    all_started = [*place.start_all(), *(place.start_all() if ALL else ())]
    for started in all_started:
        started.until(started.children)
    family = [process for started in all_started for process in started.family()]
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()
    time.sleep(1.5)
    cpu = min(os.sched_getaffinity(0))
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            for thread in process.threads():
                os.sched_setaffinity(thread.id, {cpu})
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()
    for started in all_started:
        started.must_end(0)
    place.must_hold_whole_files()


#
# a device that is lost, or hangs
#


LOSERS = [name for name in COMMANDS if name != "serve"]  # which starts llama-server anew: test_serve.py


@pytest.mark.parametrize("name", LOSERS)
def test_a_server_that_goes_is_one_sentence(name: str, place: Place, draw: random.Random) -> None:
    """At the first command that it gets, and at another on the way."""
    place.real = True
    for fails_at in (1, draw.randint(2, LEAST_COMMANDS)):
        print("fails at", fails_at)
        with RpcServer() as server, cut_proxy(server.endpoint, fails_at) as endpoint:
            place.start(name, f"rpc://{endpoint}").must_end(1)
    place.must_hold_whole_files()


@pytest.mark.thorough
def test_a_server_that_hangs_is_one_sentence_after_a_minute(place: Place, draw: random.Random) -> None:
    """All commands at once, each with a server of its own. At a greeting it takes 5 s."""
    begun = time.monotonic()
    with contextlib.ExitStack() as stack:
        for name in LOSERS:
            server = stack.enter_context(RpcServer())
            fails_at = draw.randint(2, LEAST_COMMANDS)
            endpoint = stack.enter_context(cut_proxy(server.endpoint, fails_at, silent=True))
            place.start(name, f"rpc://{endpoint}")
        for started in place.started:
            _, said = started.must_end(1)
            silent = rf"did not answer for {RPC_SILENCE_S:.0f} s|no RPC server answers at .* within 5 s"
            assert re.search(silent, said), said
    assert time.monotonic() - begun > RPC_SILENCE_S


SILENT = """
import os, signal, sys, threading
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from e2e.forced import ffn, forced
from rpc_server import RpcServer
from oallama.device.rpc_link import limit_silence
server = RpcServer()
print(server.pid, flush=True)
case = forced(Path(sys.argv[2]), f"rpc://{server.endpoint}", ffn(0.5), probe=False)
llama = case.llama()
limit_silence(server.endpoint, 1)
threading.Timer(0.2, os.kill, [server.pid, signal.SIGSTOP]).start()
while True:
    llama.reset()
    llama.eval([1] * 100)
"""


def test_a_device_that_hangs_ends_a_program_that_calls_from_python(f16: Path) -> None:
    command = [sys.executable, "-c", SILENT, str(ROOT / "tests"), str(f16)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(done.stdout), signal.SIGKILL)  # one that is stopped does not end with its parent
    assert (done.returncode, done.stderr) == (1, f"oallama: {sentence_of('ggml-rpc.cpp')}\n")


#
# device memory
#


CARD = "emulated:vram=1GiB,scale=1,values=real"
PLANS = {
    "whole layers": lambda placer: placer.plan("layers", n_prompt=64, n_gen=8),
    "slices": lambda placer: placer.plan("split", n_prompt=64, n_gen=8),
    "streams": lambda placer: placer.plan("scheinfer", n_prompt=256, n_gen=32),
}


@pytest.mark.parametrize("kind", PLANS if ALL else ["streams"])
def test_each_allocation_on_a_device_may_be_refused(kind: str, tmp_path: Path) -> None:
    """While a model is loaded, its prompt computed and a token made: less is on the device, or an error says so."""
    model = write_gguf(tmp_path / "model.gguf", "llama", weight_type="Q4_0", n_layer=4)  # the ring has fewer slots
    profile = slow_cpu_fast_card(model, 1e9)
    placer = Placer.load(model, device=CARD, profile=profile, gpu_weights=0.3, threads=1)
    plan = PLANS[kind](placer)
    wanted, before = stock_logits(model, TOKENS), load_bridge().split().memory()
    refused: list[bool] = []
    while True:
        failing = Placer.load(
            model, device=f"{CARD},fail_alloc={len(refused) + 1}", profile=profile, gpu_weights=0.3, threads=1
        )
        try:
            with failing.llama(plan, logits_all=True) as llama:
                assert nmse(placed_logits(llama, TOKENS), wanted) <= QUANTISED_NMSE
            refused.append(False)
        except DeviceError as error:
            assert "no room" in str(error) and "use a smaller --vram, -c or -ub" in str(error)
            refused.append(True)
        stats = load_bridge().emulated().stats()
        assert (stats.device_bytes, stats.pinned_bytes) == (0, 0)
        assert load_bridge().split().memory() == before
        if stats.n_allocations < len(refused):
            break
    assert len(refused) > 2 and not refused[-1]
    assert any(refused), "what does not fit is said, not passed over"


#
# signals
#


def handles(pid: int, number: signal.Signals) -> bool:
    """Whether a process handles a signal itself; what comes before is the interpreter's."""
    with contextlib.suppress(OSError, IndexError):
        caught = Path(f"/proc/{pid}/status").read_text().split("SigCgt:")[1].split()[0]
        return bool(int(caught, 16) >> (number - 1) & 1)
    return False


not_under_nohup = pytest.mark.skipif(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, reason="SIGHUP is ignored")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, pytest.param(signal.SIGHUP, marks=not_under_nohup)])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_signal_at_any_moment_ends_a_command(
    name: str, number: signal.Signals, place: Place, draw: random.Random
) -> None:
    """One moment of each command and signal. SIGTERM and SIGHUP come twice, as `timeout` and a shell
    whose terminal is closed send them."""
    started = place.start(name)
    started.until(lambda: handles(started.process.pid, signal.SIGTERM))
    time.sleep(draw.random() * LONGEST_S)
    started.signal(number)
    if number != signal.SIGINT:
        time.sleep(draw.random() * 0.002)
        started.signal(number)
    code, said = started.must_end(0, 143 if number == signal.SIGTERM else 130)
    assert said.count("oallama: interrupted") <= 1, said
    assert not code or said.splitlines()[-1] == "oallama: interrupted"
    place.must_hold_whole_files()
    assert list(place.temporary.iterdir()) == []


AT_ONCE = "import signal; signal.raise_signal(signal.SIGINT)"
INTERRUPTED = """
from oallama.cli import main
main.cli.main = lambda **_: exec('raise KeyboardInterrupt')  # CPython ends by SIGINT what left an exec of text
main.main(['devices'])
"""
UNREAD = """
import click
from oallama.cli import main
main.cli.main = lambda **_: click.echo('x' * 10**6, err=True)
main.main(['devices'])
"""
ENDING = """
import ctypes
libc = ctypes.CDLL(None)
libc.__cxa_atexit(libc.getchar, None, None)  # behind the interpreter's end: waits until stdin is closed
from oallama.cli import main
main.main(['--version'])
"""


@pytest.mark.parametrize(
    ("module", "text", "command", "stderr", "code", "said"),
    [
        ("click", AT_ONCE, "oallama", "&1", -signal.SIGINT, ""),  # before it is handled
        ("selectors", AT_ONCE, "oallama.run.die_with_parent true", "&1", -signal.SIGINT, ""),
        ("interrupted", INTERRUPTED, "interrupted", "&1", 130, "oallama: interrupted\n"),
        ("interrupted", INTERRUPTED, "interrupted", "/dev/full", 130, ""),  # nobody can be told
    ],
)
def test_ctrl_c_while_modules_are_imported(
    module: str, text: str, command: str, stderr: str, code: int, said: str, tmp_path: Path
) -> None:
    (tmp_path / f"{module}.py").write_text(text)
    words = ["sh", "-c", f'exec "$@" 2>{stderr}', "sh", sys.executable, "-m", *command.split()]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (code, said)


def test_ctrl_c_ends_a_command_whose_stderr_nobody_reads() -> None:
    """It is answered there, so it may take another one."""
    command = [sys.executable, "-c", UNREAD]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        process.stderr.read(1)
        for _ in range(20):
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1)
                break
        process.kill()
    assert process.returncode == 130


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_the_interpreter_ends_changes_nothing(number: signal.Signals) -> None:
    """CPython has given up its handlers there, and would end by the signal whatever its exit code."""
    with subprocess.Popen([sys.executable, "-c", ENDING], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline().startswith(b"oallama ")
        until(lambda: not handles(process.pid, number))
        process.send_signal(number)
        process.stdin.close()
    assert process.returncode == 0
