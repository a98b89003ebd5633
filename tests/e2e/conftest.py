"""Fixtures that end-to-end tests share: small models, a profile that is described for one, a cache."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e.described_card import slow_cpu_worker
from e2e.forced import ENDLESS_CTX
from e2e.stub import stub_program
from gguf_factory import write_gguf, write_llama_shape

from oallama.core.profile import Profile
from oallama.run.program import PROGRAM_VARIABLE


@pytest.fixture(scope="session")
def measured_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """OALLAMA_CACHE_DIR for commands on the default model: what is measured for one need not be for the next."""
    return tmp_path_factory.mktemp("measured")


@pytest.fixture(scope="session")
def two_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers in Q4_0."""
    return write_llama_shape(tmp_path_factory.mktemp("two-layers") / "model.gguf", 2, 256, 1024, 4, 2, 300, "Q4_0")


@pytest.fixture(scope="session")
def worker_profile(two_layers: Path) -> Profile:
    """A profile of two_layers on a worker: splitting and streaming it pay."""
    return slow_cpu_worker(two_layers)


@pytest.fixture(scope="session")
def f16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("models") / "f16.gguf", "llama", weight_type="F16")


@pytest.fixture(scope="session")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As f16, with a context that takes long to fill."""
    path = tmp_path_factory.mktemp("models") / "endless.gguf"
    return write_gguf(path, "llama", weight_type="F16", n_ctx=ENDLESS_CTX)


@pytest.fixture(scope="session")
def q4_0(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("models") / "q4_0.gguf", "llama", weight_type="Q4_0")


@pytest.fixture
def stub_server(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines and commands have the stand-in for llama-server, whose answers are letters."""
    monkeypatch.setenv(PROGRAM_VARIABLE, str(stub_program(tmp_path_factory.mktemp("stub"))))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the models that a file's tests write."""
    return tmp_path_factory.mktemp("models")
