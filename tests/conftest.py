"""Makes tests/ importable (gguf_factory) and keeps every test out of the user's cache."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))
from devices import worker
from processes import PATIENCE_S
from seeds import ALL

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # started in the background by a shell: children would ignore Ctrl-C as well, and the tests of it would hang
    signal.signal(signal.SIGINT, signal.default_int_handler)


# threads of OpenMP that spin for each other take most of a machine that computes something else as well
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when ggml is loaded, here and in every child
os.environ["OALLAMA_TEST_DEVICES"] = "1"  # those of devices.py
worker("rpc-worker")  # the same for all processes of this run

# no deadline: an example may take long where others compute
settings.register_profile("some", deadline=None, derandomize=True, max_examples=25)
settings.register_profile("all", deadline=None)
settings.load_profile("all" if ALL else "some")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only `scripts/test --all` runs."""
    left_out = [item for item in items if not ALL and item.get_closest_marker("thorough")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session", autouse=True)
def _cache_of_the_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For fixtures that outlive one test."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("session-cache")))
        monkeypatch.setenv("OALLAMA_BUSY_PERCENT", "100")
        yield


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A worker that dies costs the test that it died of. By itself --dist=loadfile begins that test again, until no
    worker is left."""
    from xdist.scheduler import LoadFileScheduling

    class FileScheduling(LoadFileScheduling):
        def remove_node(self, node: Any) -> str | None:
            units = self.assigned_work.get(node, {}).values()
            unit, died_of = next(
                ((unit, test) for unit in units for test, done in unit.items() if not done), ({}, None)
            )
            if died_of is not None:
                unit[died_of] = True
            super().remove_node(node)
            return died_of

        def _reschedule(self, node: Any) -> None:
            if node in self.registered_collections:  # else it takes another's place and has not collected yet
                super()._reschedule(node)

    return FileScheduling(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(scope="session", autouse=True)
def _layouts_of_the_session() -> None:
    """OALLAMA_TEST_LAYOUTS: other layouts than the CPU's (tests/layouts.py) for all processes of this run, before
    anything here asks ggml for its layouts."""
    if wanted := os.environ.get("OALLAMA_TEST_LAYOUTS"):
        from layouts import with_layouts

        from oallama.device.load_params import load_bridge

        os.environ.update(with_layouts(wanted))
        load_bridge()


@pytest.fixture(scope="module", autouse=True)
def _no_process_stays() -> Iterator[None]:
    """What a file's tests leave running would be the failure of another's."""
    yield
    _, left = psutil.wait_procs(psutil.Process().children(), timeout=PATIENCE_S)
    names = [" ".join(child.cmdline()) for child in left]
    for child in left:
        child.kill()
    assert not names, f"these processes stayed: {names}"


@pytest.fixture(autouse=True)
def _private_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Profiles, plans and downloads go to a directory of this test alone, and no model of the user's is found."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setenv("OALLAMA_BUSY_PERCENT", "100")  # what is measured serves, however busy the machine
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path_factory.mktemp("ollama")))
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "LLAMA_CACHE", "HF_ENDPOINT", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def small_cards() -> Iterator[None]:
    """CUDA's back end takes nothing for itself of described cards, which may be smaller than that."""
    from oallama.planner.runtime import RUNTIME_BYTES

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setitem(RUNTIME_BYTES, "CUDA", 0)
        yield


@pytest.fixture(scope="module")
def kept_engines() -> Iterator[None]:
    """One llama-server for all commands and engines of a file that would start it alike."""
    from kept_engine import kept

    with kept():
        yield


@pytest.fixture(scope="module")
def no_alloc_loader() -> Iterator[None]:
    """One process for all no_alloc loads of a file."""
    from kept_child import kept

    with kept():
        yield
