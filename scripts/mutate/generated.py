"""Mutants that nobody chose: a sample drawn by a seed, and what became of it."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from shared import record

from mutate.operators import Change, changes

PACKAGES = ("cost", "place", "plan", "profile", "gate")
CAUGHT, OPEN = ("caught", "late"), ("survived", "not reached")
EQUIVALENT = "equivalent"
"""Said by hand, of one that survived: no test could notice it."""


@dataclass(frozen=True)
class Mutant:
    """One change to one file, and what became of it. tests: how many were run; by: the one that noticed it.

    why: said by hand, of one that survived.
    """

    seed: int
    file: str
    line: int
    function: str
    old: str
    new: str
    nth: int
    outcome: str = ""
    tests: int = 0
    by: str = ""
    why: str = ""

    @property
    def package(self) -> str:
        return self.file.split("/")[1]

    @property
    def key(self) -> tuple[object, ...]:
        """The same wherever in the file its function stands."""
        return self.seed, self.file, self.function, self.old, self.new, self.nth


@dataclass(frozen=True)
class Drawn:
    """A mutant of the sample, and how to plant it."""

    mutant: Mutant
    change: Change


def sample(root: Path, n: int, seed: int) -> list[Drawn]:
    """About `n` mutants, of each package in proportion to its lines. What is drawn stays while its function does."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(root.glob("oallama/*/**/*.py"))}
    drawn: dict[str, list[Drawn]] = {package: [] for package in PACKAGES}
    n_lines: Counter[str] = Counter()
    for path, text in texts.items():
        file = path.relative_to(root)
        if (package := file.parts[1]) in PACKAGES:
            n_lines[package] += text.count("\n")
            drawn[package] += (_drawn(seed, file.as_posix(), change) for change in changes(text))
    of_line = n / n_lines.total()
    return [d for package in PACKAGES for d in sorted(drawn[package], key=_lot)[: round(of_line * n_lines[package])]]


def _drawn(seed: int, file: str, change: Change) -> Drawn:
    return Drawn(Mutant(seed, file, change.line, change.function, change.old, change.new, change.nth), change)


def _lot(drawn: Drawn) -> bytes:
    return hashlib.sha256(repr(drawn.mutant.key).encode()).digest()


def read_results(path: Path) -> list[Mutant]:
    """[] where there is no such file. Raises InputError."""
    if not path.is_file():
        return []
    return [record(Mutant, entry, f"{path}: a mutant") for entry in json.loads(path.read_text(encoding="utf-8"))]


def write_results(path: Path, mutants: Iterable[Mutant]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = [asdict(m) for m in sorted(mutants, key=lambda m: (m.seed, m.file, m.line, m.key))]
    path.write_text(
        "[\n" + ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in entries) + "\n]\n", encoding="utf-8"
    )


def table(mutants: Sequence[Mutant]) -> str:
    """By package, in Markdown: what was caught of those that a test could notice."""
    rows = [
        "| package | mutants | caught | equivalent | survived | caught of what is not equivalent |",
        "|---|---|---|---|---|---|",
    ]
    for package in (*PACKAGES, "all"):
        outcomes = Counter(m.outcome for m in mutants if package in ("all", m.package))
        caught, same = sum(outcomes[name] for name in CAUGHT), outcomes[EQUIVALENT]
        n = outcomes.total()
        share = f"{100 * caught / (n - same):.1f} %" if n > same else "-"
        rows.append(f"| {package} | {n} | {caught} | {same} | {n - caught - same} | {share} |")
    return "\n".join(rows)
