"""The command line: what is refused and how, one line a failure, help, stdout for results only."""

import errno
import json
import math
import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import click
import pytest

from oallama.cli import main as cli_main
from oallama.cli import output
from oallama.cli.help import Option, is_advanced
from oallama.cli.tuning import minutes_text
from oallama.core.errors import (
    DeviceError,
    DoesNotFit,
    ModelFileError,
    OallamaError,
    PlanError,
    ProfileError,
    UsageError,
)
from oallama.planner.decide import POLICY_NAMES
from oallama.stores.default_model import default_model


@pytest.fixture
def failing(monkeypatch):
    """A subcommand `boom` that raises what the test hands over."""

    def install(error):
        @click.command()
        def command():
            raise error

        monkeypatch.setitem(sys.modules, "oallama.cli.boom", SimpleNamespace(command=command))
        monkeypatch.setitem(cli_main.COMMANDS, "boom", "Fails.")
        return cli_main.exit_code(["boom"])

    monkeypatch.delenv("OALLAMA_DEBUG", raising=False)
    return install


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (ModelFileError("bad.gguf: cut short; download it again"), 2, "bad.gguf: cut short; download it again"),
        (PlanError("no plan"), 2, "no plan"),
        (UsageError("two\nlines"), 2, "two lines"),
        (ProfileError("p"), 1, "p"),
        (DeviceError("lost"), 1, "lost"),
        (DoesNotFit(3 << 30, 1 << 30, "CUDA0"), 1, "the model needs 3 GiB on CUDA0 but only 1 GiB may be used"),
        (MemoryError(), 1, "out of memory"),
        (OallamaError("MemoryError: "), 1, "out of memory"),
        (RuntimeError("can't start new thread"), 1, "out of memory"),
        (OSError(12, "Cannot allocate memory"), 1, "out of memory"),
        (ImportError("x.so: failed to map segment from shared object"), 1, "out of memory"),
        (DeviceError("no start: OpenBLAS error: Memory allocation still failed after"), 1, "out of memory"),
        (ModelFileError("m: insufficient memory (attempted to allocate 2 MB)"), 1, "out of memory"),
        (SystemError("error return without exception set"), 1, "out of memory"),
        (ModelFileError("m cannot be loaded: std::bad_alloc"), 1, "out of memory"),
        (PermissionError(13, "Permission denied", "/x"), 1, "Permission denied: /x"),
        (ZeroDivisionError("division"), 1, "internal error, please report it: ZeroDivisionError: division"),
        (DeviceError("\x1b[31mred"), 1, "\\x1b[31mred"),
    ],
)
def test_a_failure_is_one_line_and_an_exit_code(failing, capsys, error, code, says):
    assert failing(error) == code
    out, err = capsys.readouterr()
    (line,) = filter(None, err.splitlines())
    assert out == "" and line.startswith(f"oallama: {says}")


def test_an_interrupt_stays_one_whatever_is_made_of_it(failing):
    disguised = RuntimeError("Error calling __set_name__ on 'Field' instance 'a' in 'B'")  # by CPython before 3.12
    disguised.__cause__ = KeyboardInterrupt()
    on_the_way = BrokenPipeError()  # whoever read stderr has ended at the same Ctrl-C
    on_the_way.__context__ = KeyboardInterrupt()
    for error in (KeyboardInterrupt(), disguised, on_the_way):
        with pytest.raises(KeyboardInterrupt):
            failing(error)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("frobnicate", "unknown command 'frobnicate' (see oallama --help)"),
        ("rnu x.gguf", "unknown command 'rnu'; did you mean `oallama run`?"),
        ("server", "unknown command 'server'; did you mean `oallama serve`?"),
        ("help rnu", "did you mean `oallama run`?"),
        ("ls", "unknown command 'ls'; did you mean `oallama list`?"),
        ("model.gguf 'Why is it so?'", "to run it: oallama run model.gguf 'Why is it so?'"),
        ("'Once upon a time'", "unknown command 'Once upon a time'; to run it: oallama run 'Once upon a time'"),
        ("hf.co/user/repo", "to run it: oallama run hf.co/user/repo"),
        ("plan --frobnicate x.gguf", "No such option"),
        ("plan", "no model given: name a GGUF file (see oallama plan --help)"),
        ("plan a.gguf -m b.gguf", "MODEL is given twice"),
        ("plan a.gguf --vram lots", "'lots' is not a size; write e.g. 6GiB"),
        ("run hi --vram 12", "'12' is 12 bytes; write the unit, e.g. 12GiB"),
        ("plan a.gguf --gpu-weights 150%", "is not between 0 and 1"),
        ("plan a.gguf -t 0", "'0' is not a whole number from 1 to 1024"),
        ("plan a.gguf --policy magic", "'magic' is not one of"),
        ("profile a.gguf --tokens 1,x", "'x' is not a whole number from 1 to 65536"),
        ("affinity-report a.gguf --phase both", "'both' is not one of"),
        ("affinity-report a.gguf --json --format html", "--json cannot be combined with --format html"),
        ("run a.gguf hi --seed -2", "'-2' is not a seed"),
        ("run a.gguf hi -ctk q7", "'q7' is not one of"),
        ("run a.gguf hi --plan p.json --fill full", "--plan cannot be combined with"),
        ("serve a.gguf --plan p.json --affinity paper", "--plan cannot be combined with"),
        ("plan a.gguf -ngl 3 --fill full", "cannot be combined with --affinity"),
        ("run a.gguf hi -ngl 0 --prefetch layer", "cannot be combined with --affinity"),
        ("run a.gguf hi --policy cpu --affinity paper", "not to --policy cpu"),
        ("bench a.gguf --no-tuned --retune", "--no-tuned cannot be combined with --retune"),
        ("bench a.gguf --fill full", "add it to --arms"),
        ("bench a.gguf --affinity paper --arms stock-cpu,split", "add it to --arms"),
        ("bench a.gguf -o no/such/folder/result.json", "no folder no"),
        ("export plan.json", "Missing option '--to'"),
        ("run -f none.txt", "cannot read the prompt none.txt"),
        ("run -f text -p hi", "the prompt is given twice: with -p and with -f"),
        ("run -f bytes", "the prompt in bytes is not UTF-8 text"),
        ("run hi --grammar a --grammar-file b", "more than one grammar"),
        ("run hi --grammar-file none.gbnf", "cannot read the grammar none.gbnf"),
        ("run hi --json-schema {", "the JSON schema is not valid JSON"),
        ("run hi --top-p 2", "--top-p must be a probability"),
        ("run hi --stop ''", "--stop is empty"),
        ("run hi -n -2", "'-2' is not a whole number from -1 to"),
        ("run hi -c -1", "'-1' is not a whole number from 0 to"),
    ],
)
def test_wrong_usage_is_exit_code_2_and_one_line_before_anything_is_loaded(monkeypatch, capsys, tmp_path, line, says):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("oallama.placer.Placer.of_file", lambda *_: pytest.fail("a model was read"))
    (tmp_path / "text").write_text("hi")
    (tmp_path / "bytes").write_bytes(b"\xff")
    assert cli_main.exit_code(shlex.split(line)) == 2
    out, err = capsys.readouterr()
    assert says in err and err.startswith("oallama: ")
    assert (out, err.count("\n")) == ("", 1)


# ---- help and completion


def options_of(name):
    command = cli_main.cli.get_command(None, name)
    return [parameter for parameter in command.params if isinstance(parameter, click.Option)]


@pytest.mark.parametrize("name", cli_main.COMMANDS)
def test_help_fits_a_screen_and_all_of_help_names_every_option(capsys, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "80")
    assert cli_main.exit_code([name, "--help"]) == cli_main.exit_code([name, "--help-all"]) == 0
    text = capsys.readouterr().out
    short, _, long = text.rpartition(f"Usage: oallama {name}")
    assert short.count("\n") <= 45 and "\f" not in text
    listed = {word for line in short.splitlines() if line.startswith("  -") for word in line.replace(",", " ").split()}
    words = {*long.replace(",", " ").split()}
    for option in options_of(name):
        assert isinstance(option, Option)
        assert bool(listed & {*option.opts}) != is_advanced(option), option.opts
        assert {*option.opts} <= words


def test_long_times_are_told_in_minutes_and_hours():
    assert [minutes_text(seconds) for seconds in (70, 1012, 5999, 203_530)] == ["70 s", "17 min", "2 h", "57 h"]


def test_help_of_a_command_may_be_asked_for_by_a_word(capsys):
    assert cli_main.exit_code(["help", "tune"]) == 0
    by_word = capsys.readouterr().out
    assert cli_main.exit_code(["tune", "--help"]) == 0
    assert by_word == capsys.readouterr().out != ""


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_the_start_page_groups_commands(capsys, arguments):
    assert cli_main.exit_code(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    for group, commands in cli_main.START_PAGE.items():
        first = lines.index(f"{group}:") + 1
        assert [line.split()[0] for line in lines[first : first + len(commands)]] == list(commands)
    assert len(lines) <= 45


def test_every_option_is_used_in_a_test():
    """In one of its spellings, among the words that tests pass."""
    tests = "\n".join(path.read_text(encoding="utf-8") for path in Path(__file__).parents[1].rglob("*.py"))
    used = set(re.findall(r"(?<![\w-])--?[a-z][a-z0-9-]*", tests))
    unused = [
        f"{name} {option.opts[0]}"
        for name in cli_main.COMMANDS
        for option in options_of(name)
        if not used & {*option.opts, *option.secondary_opts}
    ]
    assert not unused


def test_the_shell_is_offered_policies_that_there_are_and_files(monkeypatch, capsys):
    def completed(*words):
        """What the shell would offer for the last word: kind,text."""
        monkeypatch.setenv("_OALLAMA_COMPLETE", "bash_complete")
        monkeypatch.setenv("COMP_WORDS", shlex.join(["oallama", *words]))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        assert cli_main.exit_code([]) == 0
        return capsys.readouterr().out.splitlines()

    assert completed("plan", "--policy", "") == [f"plain,{name}" for name in POLICY_NAMES]
    for line in ("run mod", "run -f mod", "plan mod", "run --profile mod"):
        assert completed(*line.split()) == ["file,mod"]


# ---- what is written


def test_json_has_no_nan_and_steers_no_terminal():
    text = output.json_text({"a": [math.nan, math.inf, 1.5], "b": ("\x1b\u202e\u009b", -math.inf)})
    assert json.loads(text) == {"a": [None, None, 1.5], "b": ["\x1b\u202e\u009b", None]}
    assert text.isascii() and "\x1b" not in text


def test_files_are_written_whole_or_not_at_all(tmp_path):
    target, link = tmp_path / "report.html", tmp_path / "link"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to(target)
    output.write_file(str(link), "new µ")
    assert link.is_symlink()
    assert target.read_text(encoding="utf-8") == "new µ"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    with pytest.raises(UsageError, match="cannot write"):
        output.write_file(str(tmp_path / "no" / "such" / "folder"), "x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "report.html"]


@pytest.mark.parametrize(("number", "written"), [(errno.EIO, ""), (errno.ENOSPC, "afterwards\n")])
def test_a_terminal_that_is_gone_is_no_failure_and_a_full_disk_is(monkeypatch, tmp_path, number, written):
    def fails(*_, **__):
        raise OSError(number, "no")

    with (tmp_path / "stderr").open("w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with monkeypatch.context() as gone:
            gone.setattr(click, "echo", fails)
            if number == errno.EIO:
                output.log("nobody reads it")
            else:
                with pytest.raises(OSError, match="no"):
                    output.log("a full disk")
        output.log("afterwards")
    assert (tmp_path / "stderr").read_text() == written


# ---- in a process of its own


def ran(*command):
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_no_name_in_a_message_steers_the_terminal(capsys):
    output.log("note: \x1b]0;mine\x07\x1b[2J is \u202egm.gguf\nand a line of its own")
    assert capsys.readouterr().err == "note: \\x1b]0;mine\\x07\\x1b[2J is \\u202egm.gguf\nand a line of its own\n"


def test_help_loads_nothing_that_searches_or_computes():
    done = ran(sys.executable, "-c", "\n".join([
        "import sys\nfrom oallama.cli import main",
        "for name in ('run', 'chat', 'serve', 'plan'): assert main.exit_code([name, '--help']) == 0",
        "heavy = {'numpy', 'llama_cpp', 'oallama.planner.decide', 'oallama.bench.ab', 'oallama.placer'}",
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)",
    ]))  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_stdout_is_for_results_even_if_native_code_prints():
    done = ran(sys.executable, "-c", "\n".join([
        "import os, sys, subprocess\nfrom oallama.cli.main import reserve_stdout\nreserve_stdout()",
        "os.write(1, b'native noise\\n')",
        "subprocess.run(['echo', 'child noise'])",
        "print('the result')",
    ]))  # fmt: skip
    assert done.stdout == "the result\n"
    assert "native noise" in done.stderr and "child noise" in done.stderr


@pytest.mark.parametrize(("stdout", "why"), [(">&-", "it is closed"), (">/dev/full", "No space left on device")])
def test_a_result_that_cannot_be_written_is_one_line_and_exit_code_1(stdout, why):
    done = ran("sh", "-c", f"exec {shlex.quote(sys.executable)} -m oallama --help {stdout}")
    assert (done.returncode, done.stderr) == (1, f"oallama: cannot write the result to stdout: {why}\n")


BEGIN = """
import asyncio, os, signal
from oallama.cli import signals
from oallama.device.interrupt import held_interrupt
def send(number): os.kill(os.getpid(), number)
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
"""
IN_A_LOOP = """
signals.AGAIN_S = 0.0
signals.treat_as_ctrl_c()
async def main():
    asked = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, asked.set)
    before = signals.asked_to_end()
    send(signal.SIGHUP)
    await asyncio.wait_for(asked.wait(), 20)
    print(before, signals.asked_to_end())
asyncio.run(main())
try:
    send(signal.SIGTERM)
except KeyboardInterrupt:
    print("interrupted")
"""
IGNORED = """
signal.signal(signal.SIGHUP, signal.SIG_IGN)
signals.treat_as_ctrl_c()
send(signal.SIGHUP)
print(signals.asked_to_end())
"""
TWICE = """
signals.treat_as_ctrl_c()
try:
    send(signal.SIGTERM)
except KeyboardInterrupt:
    signals.AGAIN_S = 1000.0
    send(signal.SIGTERM)
    send(signal.SIGHUP)
    print("once")
signals.AGAIN_S = 0.0
try:
    send(signal.SIGHUP)
except KeyboardInterrupt:
    print("anew")
"""
IN_THE_BACKGROUND = """
signal.signal(signal.SIGINT, signal.SIG_IGN)
signals.treat_as_ctrl_c()
send(signal.SIGINT)
try:
    with held_interrupt():
        send(signal.SIGTERM)
        print("held")
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (IN_A_LOOP, "False True\ninterrupted\n"),
        (IGNORED, "False\n"),
        (TWICE, "once\nanew\n"),
        (IN_THE_BACKGROUND, "held\ninterrupted\n"),
    ],
    ids=["in-a-loop", "ignored", "twice", "background"],
)
def test_sigterm_and_sighup_are_taken_for_ctrl_c_unless_they_are_ignored(code, says):
    done = ran(sys.executable, "-c", BEGIN + code)
    assert (done.stdout, done.stderr) == (says, "")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="this Python reads no TOML")
@pytest.mark.parametrize(
    "words",
    [
        ("simulate", "MODEL", "--machine", "FILE"), ("plan", "MODEL", "--device", "none", "--profile", "FILE"),
        ("plan", "MODEL", "--device", "emulated:FILE"), ("export", "FILE", "--to", "llama-server"),
        ("bench", "--matrix", "FILE"),
    ],
)  # fmt: skip
def test_a_file_that_does_not_end_is_refused_before_it_fills_the_memory(words, tmp_path, capfd):
    file = tmp_path / "endless.json"
    file.symlink_to("/dev/zero")
    given = {"MODEL": default_model(), "FILE": str(file), "emulated:FILE": f"emulated:{file}"}
    code = cli_main.exit_code([given.get(word, word) for word in words])
    said = capfd.readouterr().err.strip().splitlines()[-1]
    assert code == 2 and ("File too large" in said or "larger than 64 MiB" in said)
