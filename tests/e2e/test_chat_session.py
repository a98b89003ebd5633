"""A chat through a pipe and at a terminal, and what other commands show there."""

import base64
import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import subprocess
import termios
import time
from itertools import pairwise

import psutil
import pytest
from e2e.described_card import profile_file, slow_cpu_worker
from gguf_factory import write_gguf
from gguf_factory.projector import write_projector
from processes import COMMAND, PATIENCE_S, ROOT, here, must_end

from oallama.stores.default_model import FILE

MODEL = ROOT / "models" / FILE
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{{ '<answer>' if add_generation_prompt }}"
ON_CPU = ("--device", "none", "-t", "1")
LETTERS = f"root ::= {'line ' * 10}\nline ::= [a-z ]{{1000}}"  # that end no sooner, and are whole characters
WARM = (*ON_CPU, "--temp", "1.5", "-c", "32768", "--grammar", LETTERS)
FIGURES = re.compile(r"prompt (\d+) tokens?(?: \((\d+) cached\))?, .*? · answer (\d+) token")
PROGRESS = re.compile(r"(\d+) of (\d+) tokens")
READY, TAKEN = "\x1b[?2004h", "\x1b[?2004l"  # a prompt begins and ends: pasted text is marked in between
BUSY = re.compile(r"\r[a-z ]+: \d+ s\x1b\[K\r")  # what takes long, until there is an answer
ESCAPE = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|[=>])")


@pytest.fixture(scope="module")
def chatty(tmp_path_factory):
    """A model with a template, whose answers mean nothing."""
    return write_gguf(tmp_path_factory.mktemp("chatty") / "chatty.gguf", "llama", chat_template=TEMPLATE, n_ctx=32768)


pytestmark = pytest.mark.usefixtures("kept_engines")

#
# through a pipe
#


def piped(lines, *arguments, code=0):
    """A session that reads these lines from a pipe."""
    return here("chat", *ON_CPU, *arguments, input=lines, code=code)


def turns(done):
    """(prompt, cached, written) tokens of each answer."""
    return [tuple(int(n or 0) for n in each) for each in FIGURES.findall(done.stderr)]


def test_a_pipe_gets_answers_on_stdout_and_only_new_tokens_are_evaluated():
    asked = '/show\nHello!\n"""What is\n3 + 4?"""\nWhat is 9 - 3?\n/bye\nnot asked\n'
    done = piped(asked, "--temp", "0", "--verbose")
    assert done.stdout.splitlines()[0] == "Hello! Would you like a story or a sum?"
    assert "not asked" not in done.stdout and "the built-in story model (oallama-stories" in done.stderr
    assert "the CPU alone: all " in done.stderr
    assert len(turns(done)) == 3 and turns(done)[0][1] == 0
    for (prompt, _, written), (prompt_next, cached_next, _) in pairwise(turns(done)):
        assert cached_next >= prompt + written - 1
        assert 0 < prompt_next - cached_next < 40


def test_options_hold_until_the_session_sets_them_anew(chatty):
    lines = "a\n/set n 3\na\n/clear\n/set json_schema {}\n/set n 40\na\n/set\n"
    done = piped(lines, chatty, "-n", "2", "--system", "be brief", "--verbose", "--temp", "1.5", "-c", "512")
    assert [written for *_, written in turns(done)][:2] == [2, 3]
    assert any(line.lstrip().startswith("{") for line in done.stdout.splitlines()[2:]), "a random answer has line ends"
    assert "be brief" in done.stderr


def test_a_conversation_is_saved_and_goes_on_where_it_was(chatty, tmp_path):
    path, common = tmp_path / "talk.json", (chatty, "-n", "4", "--temp", "0", "-c", "512")
    done = piped(f"one\n/save {path}\ntwo\n", *common, "--system", "be kind")
    assert [each["role"] for each in json.loads(path.read_text())["messages"]] == ["system", "user", "assistant"]
    assert piped(f"/load {path}\ntwo\n", *common).stdout.splitlines()[-1] == done.stdout.splitlines()[-1]


def test_a_full_context_drops_the_oldest_and_takes_no_message_that_alone_is_longer(chatty):
    lines = "".join(f"message number {i} of them all\n" for i in range(16))
    done = piped(lines + "x" * 3000 + "\n", chatty, "-n", "8", "-c", "512", "--system", "be brief", "--verbose")
    assert "the model no longer sees the oldest" in done.stderr and "this message alone has" in done.stderr
    assert len(turns(done)) == 16 and all(prompt <= 512 for prompt, *_ in turns(done))


@pytest.mark.usefixtures("stub_server")
def test_a_model_without_a_template_takes_no_system_prompt(tmp_path):
    plain = write_gguf(tmp_path / "plain.gguf", "llama")
    done = piped("hi\n", plain, "--system", "be brief", code=2)
    assert "no chat template" in done.stderr and not done.stdout
    assert piped("", plain).stdout == ""


PICTURE = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def test_a_picture_goes_with_the_next_message_where_there_is_a_projector(chatty, tmp_path):
    picture, talk = tmp_path / "dot.png", tmp_path / "talk.json"
    picture.write_bytes(PICTURE)
    (tmp_path / "text.png").write_text("no picture")
    lines = f"/image {tmp_path / 'text.png'}\n/image {picture}\nwhat is it?\n/save {talk}\nand now?\n"
    common = (chatty, "-n", "2", "-c", "512", "--verbose", "--grammar", LETTERS)
    done = piped(lines, *common, "--mmproj", write_projector(tmp_path / "mmproj.gguf"))
    assert "text.png is not a picture" in done.stderr and "the vision projector takes" in done.stderr
    (first, _, _), (second, cached, _) = turns(done)
    assert first > 16, "a token for each patch"
    assert second > cached > 16
    assert json.loads(talk.read_text())["messages"][0]["content"][0]["type"] == "image_url"
    reloaded = piped(f"/load {talk}\n/save {tmp_path / 'again.json'}\n", *common)
    assert "1 turn" in reloaded.stderr
    assert (tmp_path / "again.json").read_text() == talk.read_text()
    assert "takes no pictures; start it with --mmproj" in piped(f"/image {picture}\n", *common).stderr


#
# at a terminal
#


class Typist:
    """Somebody at a terminal, where Ctrl-C and Ctrl-D are what a terminal makes of them. seen: what came and was not
    waited for yet."""

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

    def read_until(self, holds, wanted):
        """Raises OSError where the other end closes."""
        end = time.monotonic() + PATIENCE_S
        while not holds():
            ready, _, _ = select.select([self._ours], [], [], max(0, end - time.monotonic()))
            assert ready, f"no {wanted!r} came, only {self.seen!r}"
            self.seen += os.read(self._ours, 4096).decode(errors="replace")

    def wait(self, wanted):
        """What comes up to this text, without escapes."""
        self.read_until(lambda: wanted in self.seen, wanted)
        before, _, self.seen = self.seen.partition(wanted)
        return ESCAPE.sub("", before)

    def wait_for_answer(self, message):
        """Type a message, and wait until an answer is under way; what ends a prompt is shorter."""
        self.type(f"{message}\r")
        self.wait(TAKEN)
        self.read_until(lambda: len(ESCAPE.sub("", BUSY.sub("", self.seen)).strip()) > 30, "answer")

    def ask(self, message):
        """Type a message at the prompt, and see what is said up to the next prompt."""
        self.type(f"{message}\r")
        self.wait(TAKEN)
        return self.wait(READY)

    def leave(self, typed=""):
        """The exit code, when it has ended; `seen` is what was said until then."""
        self.type(typed)
        with contextlib.suppress(OSError):
            self.read_until(lambda: False, "the end")
        return self.process.wait(PATIENCE_S)

    def hang_up(self):
        """Close the terminal, as a window that is closed; the exit code then."""
        os.close(self._ours)
        self._ours = os.open(os.devnull, os.O_RDONLY)  # which __exit__ closes
        return self.process.wait(PATIENCE_S)

    def children(self):
        return [child.pid for child in psutil.Process(self.process.pid).children(recursive=True)]


@pytest.mark.parametrize("command", ["chat", pytest.param("run", marks=pytest.mark.thorough)])
def test_a_session_begins_at_once_says_what_tuning_gains_and_never_measures(command, tmp_path):
    asked = (command, MODEL, "--device", "rpc-worker:1", "--temp", "0", "--seed", "1")
    with Typist(*asked, OALLAMA_CACHE_DIR=str(tmp_path)) as person:
        begun = person.wait(READY)
        assert "using llama.cpp's placement; gain unknown until measured" in begun
        assert re.search(r"oallama stories · context 512 tokens", begun), begun
        assert "3 + 4 = 7." in person.ask("What is 3 + 4?")
        assert "unknown command /foo" in person.ask("/foo")
        person.type('"""What is\r')
        person.wait("...")
        assert "\n" in person.ask('3 + 4?"""')
        person.ask(f"/save {tmp_path / 'talk.json'}")
        assert "What is\\n3 + 4?" in (tmp_path / "talk.json").read_text()
        assert person.leave("\x04") == 0
        assert "Traceback" not in person.seen
    assert not list(tmp_path.glob("profile-*"))


def test_ctrl_c_stops_an_answer_commands_are_completed_and_what_was_typed_is_remembered(chatty, tmp_path):
    """Also while a prompt is read."""
    history, talk = tmp_path / "chat-history", tmp_path / "talk.json"
    said = [("user", "once upon a time " * 1500), ("assistant", "an end")]
    talk.write_text(json.dumps({"messages": [{"role": role, "content": content} for role, content in said]}))
    with Typist("chat", chatty, *WARM, "--verbose", OALLAMA_CACHE_DIR=str(tmp_path)) as person:
        person.wait(READY)
        person.wait_for_answer("hello")
        person.type("\x03")
        person.wait("stopped")
        person.wait(READY)
        person.type("half a line\x03\x03")
        person.wait("to leave: /bye or Ctrl-D")
        person.wait(READY)
        person.ask("/set n 5")
        _, cached, written = map(int, FIGURES.search(person.ask("and now?")).groups())
        assert written <= 5 and cached > 10  # the answer that was stopped is there
        person.ask(f"/save {tmp_path / 'so-far.json'}")
        assert "half a line" not in (tmp_path / "so-far.json").read_text()
        person.ask(f"/load {talk}")
        person.type("/retry\r")
        person.wait("reading the prompt, ")
        person.type("\x03")
        until_stopped = person.wait("stopped")
        assert all(int(n) < int(of) for n, of in PROGRESS.findall(until_stopped.replace(",", "")))
        person.wait(READY)
        assert int(FIGURES.search(person.ask("/clear") + person.ask("and now?")).group(3)) <= 5
        person.ask("a message to remember")
        person.type("/by")
        person.wait("/by")
        person.type("\t")
        person.wait("e")
        assert person.leave("\r") == 0
    assert "+a message to remember" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0


@pytest.mark.skipif(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, reason="SIGHUP is ignored")
@pytest.mark.parametrize("answering", [False, True])
@pytest.mark.usefixtures("stub_server")
def test_a_closed_terminal_ends_a_session_and_what_it_started(chatty, tmp_path, answering):
    """What was typed in an earlier session is remembered in it."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    (tmp_path / "chat-history").write_text("\n# a time\n+a message to remember\n\n# a time\n+/bye\n")
    plain = write_gguf(tmp_path / "plain.gguf", "llama", n_ctx=32768)
    with Typist("chat", plain, *WARM, TMPDIR=str(temporary), OALLAMA_CACHE_DIR=str(tmp_path)) as person:
        person.wait(READY)
        if answering:
            person.wait_for_answer("hello")
        else:
            person.type("\x1b[A\x1b[A")  # up twice, over /bye
            person.wait("a message to remember")
        children = person.children()
        assert person.hang_up() in (1, 130)  # an answer that cannot be written is a failure
        must_end(*children)
    assert list(temporary.iterdir()) == []


@pytest.mark.usefixtures("stub_server")
@pytest.mark.parametrize("ends", ["a key", "SIGTERM"])
def test_a_run_on_a_terminal_answers_with_figures_and_then_measures_until_a_key_is_pressed(tmp_path, ends):
    arguments = ("run", MODEL, "Once upon a time", "-n", "8", "--device", "rpc-worker:1")
    with Typist(*arguments, OALLAMA_CACHE_DIR=str(tmp_path)) as person:
        answer = person.wait("tuning for the next run; press any key to stop")
        figures = r"prompt \d+ tokens?, .* m?s · answer .* tokens/s · llama\.cpp's placement"
        assert re.search(figures + r" · \d+% of weights on the device · seed \d+\s", answer), answer
        children = person.children()
        if ends == "a key":
            person.type("x")
            person.wait("stopped; `oallama tune")
        else:
            person.process.terminate()
        assert person.leave() == (0 if ends == "a key" else 143)
        must_end(*children)


@pytest.mark.parametrize("no_color", ["", "1"])
def test_the_device_is_green_unless_no_color_is_set(tmp_path, no_color):
    profile = profile_file(slow_cpu_worker(MODEL), tmp_path)
    asked = ("affinity-report", MODEL, "--device", "rpc-worker:1", "--gpu-weights", "50%", "--profile", profile)
    with Typist(*asked, NO_COLOR=no_color) as person:
        assert person.leave() == 0
        assert "GPU" in person.seen and ("\x1b[32m\x1b[1mGPU" in person.seen) == (not no_color)
        assert not no_color or not re.search(r"\x1b\[[0-9;]*3[0-7]", person.seen)
