"""What several files of end-to-end tests share because measuring it takes a quarter of a minute or more."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf_factory import write_llama_shape

from oallama.core.profile import Profile
from oallama.placer import Placer
from oallama.profile.store import FOLDER_VARIABLE

WORKER = "rpc-worker:1"


@pytest.fixture(scope="session")
def measured_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """OALLAMA_CACHE_DIR for commands on the default model: what is measured for one need not be for the next."""
    return tmp_path_factory.mktemp("measured")


@pytest.fixture(scope="session")
def two_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers in Q4_0."""
    return write_llama_shape(tmp_path_factory.mktemp("two-layers") / "model.gguf", 2, 256, 1024, 4, 2, 300, "Q4_0")


@pytest.fixture(scope="session")
def measured(two_layers: Path, tmp_path_factory: pytest.TempPathFactory) -> Profile:
    """Of two_layers on one thread and a worker of one, with few batch sizes: enough of a line."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path_factory.mktemp("profile")))
        return Placer.load(two_layers, device=WORKER, threads=1).profile(progress=False, tokens=(1, 8, 64))
