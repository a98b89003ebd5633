"""A chat from outside, through a terminal and through a pipe."""

import contextlib
import fcntl
import itertools
import json
import os
import pty
import re
import select
import signal
import subprocess
import termios
import time
from pathlib import Path

import psutil
import pytest
from gguf_factory import write_gguf
from processes import COMMAND, PATIENCE_S, here, must_end

from oallama.stores.default_model import FILE

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / FILE
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{{ '<answer>' if add_generation_prompt }}"
ON_CPU = ("--device", "none", "-t", "1")
FIGURES = re.compile(r"(\d+) tokens read, (\d+) known, (\d+) written")
READY, TAKEN = "\x1b[?2004h", "\x1b[?2004l"  # a prompt begins and ends: pasted text is marked in between
ESCAPE = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|[=>])")


def piped(lines, *arguments, code=0):
    """A session that reads these lines from a pipe."""
    return here("chat", *ON_CPU, *arguments, input=lines, code=code)


class Typist:
    """Somebody at a terminal, where Ctrl-C and Ctrl-D are what a terminal makes of them."""

    def __init__(self, *arguments, **env):
        self._ours, theirs = pty.openpty()
        self.seen = ""
        self.process = subprocess.Popen(
            [*COMMAND, *map(str, arguments)], stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT,
            start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env={**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", **env},
        )  # fmt: skip
        os.close(theirs)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(PATIENCE_S)
        os.close(self._ours)

    def type(self, text):
        os.write(self._ours, text.encode())

    def wait(self, wanted):
        """What comes up to this text, without escapes."""
        end = time.monotonic() + PATIENCE_S
        while wanted not in self.seen:
            self._read(end, wanted)
        before, _, self.seen = self.seen.partition(wanted)
        return ESCAPE.sub("", before)

    def wait_for_text(self):
        """An answer is under way; what ends a prompt is shorter."""
        end = time.monotonic() + PATIENCE_S
        while len(ESCAPE.sub("", self.seen).strip()) < 30:
            self._read(end, "answer")

    def ask(self, message):
        """Type a message at the prompt, and see what is said up to the next prompt."""
        self.type(f"{message}\r")
        self.wait(TAKEN)
        return self.wait(READY)

    def leave(self):
        """The exit code, when it has ended, and what was said until then."""
        end, said = time.monotonic() + PATIENCE_S, ""
        with contextlib.suppress(OSError):  # Linux says so when the other end closes
            while True:
                self._read(end, "the end")
        said, self.seen = self.seen, ""
        return self.process.wait(PATIENCE_S), ESCAPE.sub("", said)

    def hang_up(self):
        """Close the terminal, as a window that is closed; the exit code then."""
        os.close(self._ours)
        self._ours = os.open(os.devnull, os.O_RDONLY)  # which __exit__ closes
        return self.process.wait(PATIENCE_S)

    def _read(self, end, wanted):
        ready, _, _ = select.select([self._ours], [], [], max(0, end - time.monotonic()))
        assert ready, f"no {wanted!r} came, only {self.seen!r}"
        chunk = os.read(self._ours, 4096).decode(errors="replace")
        if not chunk:
            raise OSError
        self.seen += chunk


@pytest.fixture(scope="module")
def chatty(tmp_path_factory):
    """A model with a template, whose answers mean nothing."""
    return write_gguf(tmp_path_factory.mktemp("chatty") / "chatty.gguf", "llama", chat_template=TEMPLATE, n_ctx=32768)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("plain") / "plain.gguf", "llama")


#
# through a pipe
#


def test_a_pipe_gets_answers_on_stdout_and_nothing_else():
    done = piped('Hello!\n"""What is\n3 + 4?"""\n/show placement\n/bye\nnot asked\n', "--temp", "0")
    assert done.stdout.splitlines()[0] == "Hello! Would you like a story or a sum?"
    assert len(done.stdout.splitlines()) >= 2 and "not asked" not in done.stdout
    assert "the built-in oallama-stories" in done.stderr
    assert "the CPU alone: 100% CPU" in done.stderr


def test_only_new_tokens_are_evaluated():
    said = piped("What is 3 + 4?\nWhat is 2 + 5?\nWhat is 9 - 3?\n", "--temp", "0", "--verbose").stderr
    turns = [tuple(map(int, each)) for each in FIGURES.findall(said)]
    assert len(turns) == 3
    assert turns[0][1] == 0
    for (read, known, written), (read_next, known_next, _) in itertools.pairwise(turns):
        assert known_next >= read + known + written - 1
        assert 0 < read_next < 40


def test_the_default_model_continues_text_where_it_is_asked_to():
    done = piped("Once upon a time\nOnce\n", "--no-chat", "--temp", "0", "-n", "600", "-c", "512")
    assert done.stdout.startswith(" there was")
    assert "the model has ended this text" in done.stderr


def test_settings_of_the_command_line_and_of_the_session(chatty):
    lines = "a\n/set n 3\n/set seed 9\na\n/clear\n/set format json\n/set n 40\na\n/foo\n/set temp x\n"
    done = piped(lines, chatty, "-n", "2", "--system", "be brief", "--verbose", "--temp", "1.5", "-c", "512")
    assert [int(each[2]) for each in FIGURES.findall(done.stderr)][:2] == [2, 3]
    assert done.stdout.splitlines()[2].lstrip().startswith("{")
    assert "no command /foo" in done.stderr and "temperature is a number, not x" in done.stderr


def test_a_conversation_is_saved_and_goes_on_where_it_was(chatty, tmp_path):
    path = tmp_path / "talk.json"
    common = (chatty, "-n", "4", "--temp", "0", "-c", "512")
    done = piped(f"one\n/save {path}\ntwo\n", *common, "--system", "be kind")
    saved = json.loads(path.read_text())
    assert [each["role"] for each in saved["messages"]] == ["system", "user", "assistant"]
    again = piped(f"/load {tmp_path / 'none'}\n/load {path}\ntwo\n/show system\n", *common)
    assert again.stdout.splitlines()[-1] == done.stdout.splitlines()[-1]
    assert "cannot read the conversation" in again.stderr and "be kind" in again.stderr


def test_a_full_context_drops_the_oldest(chatty):
    lines = "".join(f"message number {i} of them all\n" for i in range(8))
    done = piped(f"{lines}/show conversation\n", chatty, "-n", "8", "-c", "256", "--system", "be brief", "--verbose")
    assert "the model no longer sees the oldest" in done.stderr
    assert "after the system prompt" in done.stderr
    assert all(int(read) + int(known) <= 256 for read, known, _ in FIGURES.findall(done.stderr))
    assert len(FIGURES.findall(done.stderr)) == 8
    assert "user: message number 0" in done.stderr
    long = piped("x" * 3000 + "\nshort\n", chatty, "-n", "8", "-c", "256", "--verbose")
    assert "this message alone makes" in long.stderr
    assert len(FIGURES.findall(long.stderr)) == 1


def test_what_cannot_be_asked_for(plain, tmp_path):
    for arguments, said in (
        ((plain, "--system", "be brief"), "no chat template"),
        (("llama3",), "llama3: there is no such file"),
        ((tmp_path / "none.gguf",), "none.gguf"),
        ((plain, "-m", plain), "given twice"),
    ):
        done = piped("hi\n", *arguments, code=2)
        assert said in done.stderr and not done.stdout
    assert piped("", plain).stdout == ""


def test_ctrl_c_ends_a_session_in_a_pipe(chatty):
    with subprocess.Popen(
        [*COMMAND, "chat", chatty, *ON_CPU, "--temp", "1.5", "-c", "32768"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT,
    ) as process:  # fmt: skip
        process.stdin.write(b"hi\n")
        process.stdin.flush()
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130


#
# at a terminal
#


@pytest.mark.parametrize("command", ["chat", pytest.param("run", marks=pytest.mark.thorough)])
def test_a_session_at_a_terminal(command):
    with Typist(command, MODEL, *ON_CPU, "--temp", "0", "--seed", "1") as person:
        assert "oallama stories · 100% CPU · context 512 tokens" in person.wait(READY)
        assert "3 + 4 = 7." in person.ask("What is 3 + 4?")
        assert "no command /foo" in person.ask("/foo")
        person.type('"""What is\r')
        person.wait("...")
        assert "\n" in person.ask('3 + 4?"""')
        assert "user: What is" in person.ask("/show conversation")
        person.type("\x04")
        code, said = person.leave()
    assert code == 0
    assert "Traceback" not in said


def test_ctrl_c_stops_the_answer_and_at_the_prompt_says_how_to_leave(chatty):
    with Typist("chat", chatty, *ON_CPU, "--temp", "1.5", "-c", "32768", "--verbose") as person:
        person.wait(READY)
        person.type("hello\r")
        person.wait(TAKEN)
        person.wait_for_text()  # in the middle of the answer
        person.type("\x03")
        person.wait("stopped")
        person.wait(READY)
        person.type("half a line\x03\x03")
        person.wait("to leave: /bye or Ctrl-D")
        person.wait(READY)
        person.ask("/set n 5")
        said = person.ask("and now?")
        _, known, written = map(int, FIGURES.search(said).groups())
        assert written <= 5 and known > 10  # the answer that was stopped is there
        assert "half a line" not in person.ask("/show conversation")
        person.type("/bye\r")
        assert person.leave()[0] == 0


@pytest.mark.skipif(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, reason="SIGHUP is ignored")
@pytest.mark.parametrize("answering", [False, True])
def test_a_closed_terminal_ends_a_session_and_what_it_started(chatty, tmp_path, answering):
    with Typist("chat", chatty, *ON_CPU, "--temp", "1.5", "-c", "32768", TMPDIR=str(tmp_path)) as person:
        person.wait(READY)
        if answering:
            person.type("hello\r")
            person.wait(TAKEN)
            person.wait_for_text()
        children = psutil.Process(person.process.pid).children(recursive=True)
        assert person.hang_up() in (1, 130)  # an answer that cannot be written is a failure
        must_end(*(child.pid for child in children))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ends", ["a key", pytest.param("SIGTERM", marks=pytest.mark.thorough)])
def test_a_run_on_a_terminal_answers_and_then_measures_until_a_key_is_pressed(tmp_path, ends):
    arguments = ("run", MODEL, "Once upon a time", "-n", "8", "--device", "rpc-worker:1", "--temp", "0")
    with Typist(*arguments, OALLAMA_CACHE_DIR=str(tmp_path)) as person:
        person.wait("so that the next run is faster; any key ends it")
        children = psutil.Process(person.process.pid).children(recursive=True)
        if ends == "a key":
            person.type("x")
            person.wait("measuring has ended; the next run or `oallama tune")
        else:
            person.process.terminate()
        assert person.leave()[0] == (0 if ends == "a key" else 143)
        must_end(*(child.pid for child in children))


def test_a_chat_begins_at_once_says_what_tuning_gains_and_never_measures(tmp_path):
    arguments = ("chat", MODEL, "--device", "rpc-worker:1", "--temp", "0")
    with Typist(*arguments, OALLAMA_CACHE_DIR=str(tmp_path)) as person:
        person.wait("what another one gains is not known, as this machine was not measured yet")
        person.wait(READY)
        assert "3 + 4 = 7." in person.ask("What is 3 + 4?")
        person.type("/bye\r")
        assert person.leave()[0] == 0
    assert not list(tmp_path.glob("profile-*"))


def test_what_was_typed_is_remembered_and_commands_are_completed(chatty, tmp_path):
    cache = {"OALLAMA_CACHE_DIR": str(tmp_path / "cache")}
    with Typist("chat", chatty, *ON_CPU, "-n", "2", "-c", "512", **cache) as person:
        person.wait(READY)
        person.ask("a message to remember")
        person.type("/by")
        person.wait("/by")
        person.type("\t")
        person.wait("e")
        person.type("\r")
        assert person.leave()[0] == 0
    history = tmp_path / "cache" / "chat-history"
    assert "+a message to remember" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0
    with Typist("chat", chatty, *ON_CPU, "-n", "2", "-c", "512", **cache) as person:
        person.wait(READY)
        person.type("\x1b[A\x1b[A\r")  # up twice, over /bye
        person.wait(READY)
        assert "user: a message to remember" in person.ask("/show conversation")
        person.type("\x04")
        assert person.leave()[0] == 0
