"""Notes each start of llama-server, with the test that it is for, in the file that OALLAMA_TEST_STARTS names.

`scripts/test` sets it, and has every Python of its run import this as it begins, by PYTHONPATH.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

PROGRAM, LAUNCH = "llama-server", "oallama.run.die_with_parent"
ELF = b"\x7fELF"  # the stand-in of tests is a script


def started_by(command: list[str]) -> bool:
    """Whether a command starts it: by itself, by the product's launcher, or from a shell."""
    if Path(command[0]).name == "bash":
        return f"{PROGRAM} -m " in command[-1]
    program = Path(command[command.index(LAUNCH) + 1] if LAUNCH in command else command[0])
    if program.name != PROGRAM or not program.is_file():
        return False
    with program.open("rb") as file:
        return file.read(len(ELF)) == ELF


def note(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "subprocess.Popen" or isinstance(arguments[1], (str, bytes, os.PathLike)):
        return
    if started_by([os.fsdecode(word) for word in arguments[1]]):
        test = os.environ.get("PYTEST_CURRENT_TEST", "no test").replace("\n", " ")
        with Path(os.environ["OALLAMA_TEST_STARTS"]).open("a", encoding="utf-8") as file:
            file.write(f"{test}\n")


if os.environ.get("OALLAMA_TEST_STARTS"):
    sys.addaudithook(note)
