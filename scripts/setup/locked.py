"""The packages of an environment, each of one version and known by its hash: locked.txt, and which of them are needed.

`scripts/lock_packages.py` writes locked.txt from pyproject.toml. It is a requirements file of pip: every package that
any set-up needs, its hashes, and behind each `# via` what needs it. What was asked for stands in its first lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .errors import SetupError

LOCK = Path(__file__).with_name("locked.txt")
COMPILED_HERE = "llama-cpp-python"
PROJECT, TOOLS = "oallama", "build"
"""Names in the first lines, beside the extras: what oallama needs, and what compiles it."""
_GIVEN = re.compile(r"# (\w+): (.+)")
_PACKAGE = re.compile(r"([a-z0-9][a-z0-9-]*)(?:\[[a-z0-9,-]+\])?==")
_NEEDED_BY = re.compile(r"\s+#(?: via)?\s+([a-z0-9][a-z0-9-]*)$")


@dataclass(frozen=True)
class Lock:
    """given: by extra, PROJECT or TOOLS, the packages that it names. texts: by package, its lines for pip (several
    where versions differ by platform). needed_by: by package, the packages that need it."""

    given: Mapping[str, tuple[str, ...]]
    texts: Mapping[str, str]
    needed_by: Mapping[str, frozenset[str]]

    def closure(self, names: Iterable[str]) -> frozenset[str]:
        """These packages, and all that they need."""
        found = frozenset(names)
        while more := {name for name, by in self.needed_by.items() if name not in found and by & found}:
            found |= more
        return found

    def requirements(self, groups: Iterable[str]) -> str:
        """What pip installs by its hashes for these extras, PROJECT or TOOLS; for an extra that is not locked nothing,
        and llama-cpp-python apart, which is compiled here."""
        wanted = self.closure(self._named(groups)) - {COMPILED_HERE}
        return "".join(text for name, text in self.texts.items() if name in wanted)

    def unlocked(self, groups: Iterable[str]) -> str:
        """The same, of any version."""
        return "\n".join(sorted(self._named(groups) - {COMPILED_HERE}))

    def _named(self, groups: Iterable[str]) -> set[str]:
        return {name for group in groups for name in self.given.get(group, ())}


def read_lock(text: str) -> Lock:
    """Raises SetupError for a file that is none."""
    given: dict[str, tuple[str, ...]] = {}
    texts: dict[str, str] = {}
    needed_by: dict[str, frozenset[str]] = {}
    name = None
    for line in text.splitlines(keepends=True):
        if package := _PACKAGE.match(line):
            name = package[1]
        if name is None:
            if group := _GIVEN.match(line):
                given[group[1]] = tuple(group[2].split())
            continue
        texts[name] = texts.get(name, "") + line
        if parent := _NEEDED_BY.match(line):
            needed_by[name] = needed_by.get(name, frozenset()) | {parent[1]}
    missing = {name for names in given.values() for name in names} - set(texts)
    if not {PROJECT, TOOLS} <= set(given) or missing:
        raise SetupError(
            f"{LOCK.name} is damaged ({', '.join(sorted(missing)) or 'its first lines are missing'}): restore it"
        )
    return Lock(given, texts, needed_by)
