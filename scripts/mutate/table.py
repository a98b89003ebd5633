"""The table of mutants: small faults, each with the tests that should notice it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shared import InputError, read_toml, record

TABLE = Path(__file__).with_name("mutants.toml")


@dataclass(frozen=True)
class Mutant:
    """One fault: in `file`, `old` becomes `new`. tests: as pytest takes them."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def planted(self, text: str) -> str:
        """The file's text with the fault. Raises InputError unless `old` is in it exactly once."""
        count = text.count(self.old)
        if count != 1:
            where = "is not" if count == 0 else f"is {count} times"
            raise InputError(f"mutant {self.name!r} is stale: its old text {where} in {self.file}; look what it became")
        return text.replace(self.old, self.new)


def read_table(path: Path = TABLE) -> tuple[Mutant, ...]:
    """Raises InputError for what is no table of mutants, and for two of one name."""
    made = tuple(record(Mutant, entry, f"{path}: a mutant") for entry in read_toml(path).get("mutant", []))
    for mutant in made:
        if not mutant.tests or mutant.old == mutant.new:
            raise InputError(f"{path}: mutant {mutant.name!r} changes nothing, or has no tests")
    names = [mutant.name for mutant in made]
    if len(set(names)) < len(names):
        raise InputError(f"{path}: two mutants have one name: {next(n for n in names if names.count(n) > 1)}")
    return made


def check_table(mutants: Sequence[Mutant], root: Path) -> None:
    """Raises InputError where a mutant's file or test is not there, or its text has changed."""
    for mutant in mutants:
        for name in (mutant.file, *(test.partition("::")[0] for test in mutant.tests)):
            if not (root / name).is_file():
                raise InputError(f"mutant {mutant.name!r} is stale: there is no {name}")
        mutant.planted((root / mutant.file).read_text(encoding="utf-8"))
