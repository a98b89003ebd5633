"""Extensions of other packages: they are imported when they are asked for, and a broken one costs nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from processes import COMMAND, here

from oallama.cli.main import exit_code
from oallama.core.errors import UsageError
from oallama.core.extensions import extension_names, load_extension
from oallama.planner.decide import policy_named
from oallama.planner.policies.registry import POLICIES, policy_names
from oallama.stores.default_model import default_model

BROKEN = "raise ImportError('no module named solver')"
WORKS = """
from oallama.planner.policies.registry import policy
policy("strangers", "as theirs has it")(lambda problem, budget: ())
"""
Install = Callable[[str, str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Put a distribution `strange-one` on the path, whose module has this text, and which offers it to a group."""

    def installed(group: str, name: str, text: str) -> None:
        (tmp_path / "strange_module.py").write_text(text)
        told = tmp_path / "strange_one-1.0.dist-info"
        told.mkdir()
        (told / "METADATA").write_text("Metadata-Version: 2.1\nName: strange-one\nVersion: 1.0\n")
        (told / "entry_points.txt").write_text(f"[{group}]\n{name} = strange_module\n")

    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "strange_module", raising=False)
    yield installed
    POLICIES.pop("strangers", None)
    sys.modules.pop("strange_module", None)


def test_a_policy_of_another_package_is_imported_when_it_is_asked_for(install: Install) -> None:
    install("oallama.policies", "strangers", WORKS)
    assert "strangers" in policy_names() and "strange_module" not in sys.modules
    chosen = policy_named("strangers")
    assert chosen is not None and chosen.help == "as theirs has it"


def test_a_module_that_registers_another_name_says_so(install: Install) -> None:
    install("oallama.policies", "others", WORKS)
    with pytest.raises(UsageError, match=r"does not register it; use @policy\('others', …\)"):
        policy_named("others")


def test_a_broken_policy_costs_nothing_but_itself(install: Install, tmp_path: Path) -> None:
    install("oallama.policies", "strangers", BROKEN)
    for words in (("devices",), ("list",), ("plan", "--help-all"), ("bench", "--help")):
        assert "strange" not in here(*words).stderr
    assert policy_named("oato") is not None and "strange_module" not in sys.modules
    command = [*COMMAND, "plan", default_model(), "--policy", "strangers"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 2 and done.stderr.splitlines() == [
        "oallama: strangers is of the package strange-one, which cannot be imported (ImportError: no module named "
        "solver); repair or uninstall it"
    ]


def test_a_broken_extension_of_bench_is_not_imported(install: Install) -> None:
    install("oallama.bench", "strangers", BROKEN)
    assert exit_code(["bench", "--help"]) == 0
    assert "strangers" in extension_names("oallama.bench") and "strange_module" not in sys.modules
    with pytest.raises(UsageError, match="package strange-one"):
        load_extension("oallama.bench", "strangers")
    assert load_extension("oallama.bench", "nobody's") is None
