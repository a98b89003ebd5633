"""The static operator list against the graph of a real decode in stock llama.cpp, for all that the factory writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gguf_factory import ARCHITECTURES, write_gguf, write_llama_shape
from operator_trace import adjoining, tracing

from oallama.core.ggml_types import MUL_MAT_TYPES
from oallama.model.gguf_reader import read_gguf
from oallama.model.operators import operators

Check = Callable[[Path], None]


@pytest.fixture(scope="module")
def check() -> Iterator[Check]:
    """Holds the list of a file against its graph."""
    with tracing() as trace:

        def check(path: Path) -> None:
            listed, traced = operators(read_gguf(path)), trace(path)
            assert [(o.name, o.op, o.shape, o.input_f32) for o in listed] == [row[:4] for row in traced]
            assert adjoining((o.name, o.adjoins) for o in listed) == adjoining((row[0], row[4]) for row in traced)

        yield check


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_static_list_is_the_traced_one(check: Check, arch: str, tmp_path: Path) -> None:
    check(write_gguf(tmp_path / "model.gguf", arch, n_layer=3))


@pytest.mark.parametrize(
    ("arch", "metadata"),
    [
        ("gemma3", {"gemma3.attention.sliding_window": None}),
        ("gemma2", {"gemma2.attention.sliding_window": None}),
        ("olmo2", {"olmo2.attention.sliding_window": 64, "olmo2.attention.sliding_window_pattern": 4}),
        ("gptneox", {"gptneox.use_parallel_residual": False}),
        ("lfm2", {"lfm2.attention.sliding_window": 64}),
        ("cohere2", {"cohere2.attention.sliding_window_pattern": [True, False, False]}),
        ("granite", {"granite.rope.scaling.finetuned": False}),
    ],
)
def test_metadata_that_change_the_graph_change_the_list(
    check: Check, arch: str, metadata: dict[str, Any], tmp_path: Path
) -> None:
    check(write_gguf(tmp_path / "model.gguf", arch, n_layer=3, metadata=metadata))


@pytest.mark.parametrize("weight_type", sorted(MUL_MAT_TYPES - {"Q2_0"}))  # which gguf 0.19 cannot write
def test_every_type_that_passes_validation_decodes(check: Check, weight_type: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", "llama-tied", weight_type=weight_type, n_layer=1)
    check(path)
    assert {o.type for o in operators(read_gguf(path))} == {weight_type}


def test_split_and_synthetic_models(check: Check, tmp_path: Path) -> None:
    check(write_gguf(tmp_path / "model.gguf", "llama", split_max_tensors=5))
    check(write_llama_shape(tmp_path / "model.gguf", 3, 512, 1024, 8, 2, 300, "Q4_K"))
    check(write_llama_shape(tmp_path / "moe.gguf", 2, 256, 512, 4, 2, 300, "Q4_0", n_expert=4))
