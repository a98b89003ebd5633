"""docs/cli.md is what the command line says of itself, and docs/python.md what the public classes do."""

import subprocess
import sys
from pathlib import Path

import click
import pytest

from oallama.cli.main import COMMANDS, cli

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("generator", ["gen_cli_docs.py", "gen_python_docs.py"])
def test_the_document_is_current(generator):
    command = [sys.executable, str(ROOT / "scripts" / generator), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


CONTRACT = {
    "devices": "--json --backend",
    "inspect": "--json -m -hf --hf-repo",
    "profile": "--device --tokens --refresh --json -m --threads",
    "affinity-report": "--device --vram --vram-fill --gpu-weights --threads --phase -p -n --profile --format -o -m -c",
    "plan": "--policy --device --vram --vram-fill --gpu-weights --threads -p -n --profile -o -m -c",
    "run": "-hf -p -n --plan --policy --seed --temp --json -m -c -b -ub -t -ctk -ctv -fa --device --vram --gpu-weights",
    "pull": "--json",
    "list": "--json",
    "serve": "--host --port --api-key -m -c -b -ub -t -ctk -ctv -fa --device --vram --gpu-weights --plan --policy",
    "chat": "-n --plan --policy --system --seed --temp --stop -j -m -c --device --vram --tune --verbose --chat",
    "tune": "-p -c -m --device --vram --profile --json --time",
    "what-if": "--gpu --policy --json -p -n -c -m --vram-fill --threads --profile",
    "simulate": "-m --model --machine --policy --device --profile -p -n --json -o",
    "bench": "--arms -p -n -d -r -o --device --vram --vram-fill --gpu-weights --threads --json -m -c -b -ub -fa",
    "export": "--to -o",
    "doctor": "--json",
    "setup": "--llama-cpp",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_contracts_spellings_exist(name):
    command = cli.get_command(click.Context(cli), name)
    spellings = {spelling for parameter in command.params for spelling in parameter.opts}
    assert set(CONTRACT[name].split()) <= spellings
