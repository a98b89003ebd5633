"""The command line's edges: exit codes, one line per failure, stdout for results only."""

import json
import math
import shlex
import stat
import subprocess
import sys
import types

import click
import pytest

from oallama.cli import main as cli_main
from oallama.cli import output
from oallama.core.errors import (
    DeviceError,
    DoesNotFit,
    ModelFileError,
    OallamaError,
    PlanError,
    ProfileError,
    UsageError,
)
from oallama.place.decide import POLICIES
from oallama.place.policies.stock import FIT


@pytest.fixture
def failing(monkeypatch):
    """A subcommand `boom` that raises what the test hands over."""

    def install(error):
        @click.command()
        def command():
            raise error

        module = types.ModuleType("oallama.cli.boom")
        module.command = command
        monkeypatch.setitem(sys.modules, "oallama.cli.boom", module)
        monkeypatch.setitem(cli_main.COMMANDS, "boom", "Fails.")
        return cli_main.exit_code(["boom"])

    monkeypatch.delenv("OALLAMA_DEBUG", raising=False)
    return install


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (
            ModelFileError("bad.gguf: cut short; download it again"),
            2,
            "oallama: bad.gguf: cut short; download it again",
        ),
        (PlanError("no plan"), 2, "oallama: no plan"),
        (UsageError("two\nlines"), 2, "oallama: two lines"),
        (ProfileError("p"), 1, "oallama: p"),
        (DeviceError("lost"), 1, "oallama: lost"),
        (
            DoesNotFit(3 << 30, 1 << 30, "CUDA0"),
            1,
            "oallama: the model needs 3 GiB on CUDA0 but only 1 GiB may be used",
        ),
        (MemoryError(), 1, "oallama: out of memory"),
        (OallamaError("MemoryError: "), 1, "oallama: out of memory"),
        (RuntimeError("can't start new thread"), 1, "oallama: out of memory"),
        (OSError(12, "Cannot allocate memory"), 1, "oallama: out of memory"),
        (ImportError("x.so: failed to map segment from shared object"), 1, "oallama: out of memory"),
        (DeviceError("no start: OpenBLAS error: Memory allocation still failed after"), 1, "oallama: out of memory"),
        (ModelFileError("m: insufficient memory (attempted to allocate 2 MB)"), 1, "oallama: out of memory"),
        (SystemError("error return without exception set"), 1, "oallama: out of memory"),
        (ModelFileError("m cannot be loaded: std::bad_alloc"), 1, "oallama: out of memory"),
        (PermissionError(13, "Permission denied", "/x"), 1, "oallama: Permission denied: /x"),
        (ZeroDivisionError("division"), 1, "oallama: internal error, please report it: ZeroDivisionError: division"),
        (DeviceError("\x1b[31mred"), 1, "oallama: \\x1b[31mred"),
    ],
)
def test_a_failure_is_one_line_and_an_exit_code(failing, capsys, error, code, says):
    assert failing(error) == code
    said = capsys.readouterr()
    assert said.out == ""
    lines = [line for line in said.err.splitlines() if line]
    assert len(lines) == 1
    assert lines[0].startswith(says)


def disguised():
    """As CPython before 3.12 does where a class is being made."""
    error = RuntimeError("Error calling __set_name__ on 'Field' instance 'a' in 'B'")
    error.__cause__ = KeyboardInterrupt()
    return error


def on_the_way():
    """Whoever read stderr has ended at the same Ctrl-C."""
    error = BrokenPipeError()
    error.__context__ = KeyboardInterrupt()
    return error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), disguised(), on_the_way()], ids=["plain", "disguised", "told"])
def test_an_interrupt_stays_one_whatever_is_made_of_it(failing, error):
    with pytest.raises(KeyboardInterrupt):
        failing(error)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["frobnicate"], "there is no command 'frobnicate' (see oallama --help)"),
        (["plan", "--frobnicate", "x.gguf"], "No such option"),
        (["plan"], "no MODEL: name a GGUF file (see oallama plan --help)"),
        (["plan", "a.gguf", "-m", "b.gguf"], "MODEL is given twice"),
        (["plan", "a.gguf", "--vram", "lots"], "'lots' is not a size; write it like 6GiB"),
        (["plan", "a.gguf", "--gpu-weights", "150%"], "is outside 0..1"),
        (["plan", "a.gguf", "-t", "0"], "'0' is not a whole number from 1 to 1024"),
        (["plan", "a.gguf", "--policy", "magic"], "'magic' is not one of"),
        (["profile", "a.gguf", "--tokens", "1,x"], "'1,x' is not a list of token counts"),
        (["affinity-report", "a.gguf", "--phase", "both"], "'both' is not one of"),
        (["affinity-report", "a.gguf", "--json", "--format", "csv"], "--json and --format csv exclude each other"),
        (["run", "a.gguf", "hi", "--seed", "-2"], "'-2' is not a seed"),
        (["run", "a.gguf", "hi", "-ctk", "q7"], "'q7' is not one of"),
        (["run", "a.gguf", "hi", "--plan", "p.json", "--fill", "full"], "--plan goes without"),
        (["serve", "a.gguf", "--plan", "p.json", "--affinity", "paper"], "--plan goes without"),
        (["plan", "a.gguf", "-ngl", "3", "--fill", "full"], "do not go with it"),
        (["run", "a.gguf", "hi", "-ngl", "0", "--prefetch", "layer"], "do not go with it"),
        (["run", "a.gguf", "hi", "--policy", "cpu", "--affinity", "paper"], "--policy cpu does not use them"),
        (["bench", "a.gguf", "--no-gate", "--refresh-gate"], "--no-gate and --refresh-gate exclude each other"),
        (["bench", "a.gguf", "--fill", "full"], "no arm is oato"),
        (["bench", "a.gguf", "--affinity", "paper", "--arms", "stock-cpu,split"], "no arm is oato"),
        (["export", "plan.json"], "Missing option '--to'"),
    ],
)
def test_wrong_usage_is_exit_code_2_and_names_the_remedy(capsys, arguments, says):
    assert cli_main.exit_code(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert says in said.err
    assert said.err.startswith("oallama: ")
    assert said.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["rnu", "x.gguf"], "did you mean `oallama run`?"),
        (["server"], "did you mean `oallama serve`?"),
        (["ps"], "only `oallama serve` keeps a model loaded"),
        (["show", "x"], "`oallama inspect MODEL`"),
        (["ls"], "`oallama list`"),
        (["model.gguf", "Why is it so?"], "to run it: oallama run model.gguf 'Why is it so?'"),
        (["Once upon a time"], "to run it: oallama run 'Once upon a time'"),
        (["hf.co/user/repo"], "to run it: oallama run hf.co/user/repo"),
    ],
)
def test_a_word_that_is_no_command_names_what_was_meant(capsys, arguments, says):
    assert cli_main.exit_code(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"oallama: there is no command {arguments[0]!r}; ")
    assert says in said.err


def completed(monkeypatch, capsys, *words):
    """What the shell would offer for the last word: (kind, text)."""
    monkeypatch.setenv("_OALLAMA_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", shlex.join(["oallama", *words]))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    assert cli_main.exit_code([]) == 0
    return [tuple(line.split(",", 1)) for line in capsys.readouterr().out.splitlines()]


def test_the_shell_is_offered_policies_that_there_are_and_files(monkeypatch, capsys):
    offered = completed(monkeypatch, capsys, "plan", "--policy", "")
    assert [name for _, name in offered] == [*POLICIES, FIT]
    for line in (("run", "mod"), ("run", "-f", "mod"), ("plan", "mod"), ("run", "--profile", "mod")):
        assert completed(monkeypatch, capsys, *line) == [("file", "mod")]
    assert completed(monkeypatch, capsys, "what-if", "--chart", "mod") == [("file", "mod")]


def test_json_has_no_nan_and_steers_no_terminal():
    text = output.json_text({"a": [math.nan, math.inf, 1.5], "b": ("\x1b\u202e\u009b", -math.inf)})
    assert json.loads(text) == {"a": [None, None, 1.5], "b": ["\x1b\u202e\u009b", None]}
    assert text.isascii()
    assert "\x1b" not in text


def test_files_are_written_whole_or_not_at_all(tmp_path):
    target = tmp_path / "report.html"
    target.write_text("old")
    target.chmod(0o640)
    link = tmp_path / "link"
    link.symlink_to(target)
    output.write_file(str(link), "new µ")
    assert link.is_symlink()
    assert target.read_text(encoding="utf-8") == "new µ"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    with pytest.raises(UsageError, match="cannot write"):
        output.write_file(str(tmp_path / "no" / "such" / "folder"), "x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "report.html"]


def python(code, **options):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, **options)


def test_stdout_is_for_results_even_if_native_code_prints():
    done = python(
        "import os, sys, subprocess\n"
        "from oallama.cli.main import claim_stdout\n"
        "claim_stdout()\n"
        "os.write(1, b'native noise\\n')\n"
        "subprocess.run(['echo', 'child noise'])\n"
        "print('the result')\n"
    )
    assert done.stdout == "the result\n"
    assert "native noise" in done.stderr
    assert "child noise" in done.stderr


@pytest.mark.parametrize(("stdout", "why"), [(">&-", "it is closed"), (">/dev/full", "No space left on device")])
def test_a_result_that_cannot_be_written_is_one_line_and_exit_code_1(stdout, why):
    line = f"exec {shlex.quote(sys.executable)} -m oallama --help {stdout}"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, f"oallama: cannot write the result to stdout: {why}\n")


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_the_start_page_groups_commands(capsys, arguments):
    assert cli_main.exit_code(arguments) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    for group, commands in cli_main.START_PAGE.items():
        first = lines.index(f"{group}:") + 1
        assert [line.split()[0] for line in lines[first : first + len(commands)]] == list(commands)
    assert len(lines) <= 45
