"""Help: options in groups, what most people need by --help, everything by --help-all, and both at once."""

import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from oallama.cli import main as cli_main
from oallama.cli.help import Option, is_advanced

SCREEN = 45  # lines of 80 characters


def shown(capsys, monkeypatch, *arguments):
    monkeypatch.setenv("COLUMNS", "80")
    assert cli_main.exit_code([*arguments]) == 0
    return capsys.readouterr().out


def options_of(name):
    command = cli_main.cli.get_command(None, name)
    return [parameter for parameter in command.params if isinstance(parameter, click.Option)]


@pytest.mark.parametrize("name", cli_main.COMMANDS)
def test_help_fits_a_screen_and_leaves_out_what_is_advanced(capsys, monkeypatch, name):
    text = shown(capsys, monkeypatch, name, "--help")
    assert text.count("\n") <= SCREEN
    listed = {word for line in text.splitlines() if line.startswith("  -") for word in line.replace(",", " ").split()}
    for option in options_of(name):
        assert bool(listed & set(option.opts)) != is_advanced(option), option.opts


@pytest.mark.parametrize("name", cli_main.COMMANDS)
def test_all_of_help_names_every_option_and_spelling(capsys, monkeypatch, name):
    text = shown(capsys, monkeypatch, name, "--help-all")
    assert "\f" not in text
    words = text.replace(",", " ").split()
    for option in options_of(name):
        assert isinstance(option, Option)
        for spelling in option.opts:
            assert spelling in words, spelling


@pytest.mark.parametrize("name", ["run", "chat", "serve", "plan"])
def test_help_loads_nothing_that_searches_or_computes(name):
    code = (
        "import sys\nfrom oallama.cli import main\n"
        f"assert main.exit_code([{name!r}, '--help']) == 0\n"
        "heavy = {'numpy', 'llama_cpp', 'oallama.place.decide', 'oallama.bench.ab', 'oallama.placer'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_every_option_is_used_in_a_test():
    """In one of its spellings, among the words that tests pass."""
    tests = "\n".join(path.read_text(encoding="utf-8") for path in Path(__file__).parents[1].rglob("*.py"))
    used = set(re.findall(r"(?<![\w-])--?[a-z][a-z0-9-]*", tests))
    unused = {
        f"{name} {option.opts[0]}"
        for name in cli_main.COMMANDS
        for option in options_of(name)
        if not used & {*option.opts, *option.secondary_opts}
    }
    assert not unused
