"""LoRA adapters beside split weights: they compute what stock llama.cpp's do, and plans keep room for them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from devices import REAL
from e2e.forced import Share, everything, ffn, forced, nothing, written
from e2e.logits import TOKENS, assert_stock, placed_logits
from gguf_factory import write_gguf
from gguf_factory.adapter import write_adapter
from processes import here

pytestmark = pytest.mark.usefixtures("kept_engines")

CARD = "emulated:rtx3060-12,vram=64MiB,scale=9,values=real"


@pytest.mark.parametrize("share", [ffn(0.25, 0.25), everything(0.5)], ids=["streamed", "whole blocks"])
@pytest.mark.parametrize("arch", ["llama", "llama-moe"])
def test_logits_are_stocks(tmp_path: Path, models: Path, arch: str, share: Share) -> None:
    model = written(models, arch)
    adapter = str(write_adapter(tmp_path / "adapter.gguf", model))
    with forced(model, CARD, share).llama(lora_path=adapter) as llama:
        assert_stock(placed_logits(llama, TOKENS), model, TOKENS, lora_path=adapter)


def test_run_keeps_room_for_it_and_answers_with_it(tmp_path: Path, f16: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter.gguf", f16)
    on = (f16, "Once", "-n", 8, "--temp", 0, "--json", "--tune", "never", "--device", REAL)
    changed, unused = (
        json.loads(here("run", *on, "--", *more).stdout)
        for more in (("--lora", adapter), ("--lora-scaled", f"{adapter}:0"))
    )
    assert unused["text"] != changed["text"]


@pytest.mark.usefixtures("stub_server")
def test_a_plan_counts_its_bytes(tmp_path: Path, f16: Path) -> None:
    """Of the weights that are on the device whole; of others the adapter is on the host."""
    adapter = write_adapter(tmp_path / "adapter.gguf", f16)
    for share, fits in ((nothing, True), (everything(1.0), False)):
        plan = forced(f16, REAL, share).with_breakdown(spare=100).plan
        plan.save(tmp_path / "plan.json")
        command = ("run", f16, "hi", "-n", 1, "--plan", tmp_path / "plan.json", "--", "--lora", adapter)
        said = here(*command, code=0 if fits else 1).stderr
        assert fits or ("LoRA needs" in said and "plan anew with less --vram" in said)


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("model", "not a LoRA adapter"), ("missing", "no such file"), ("other", "use an adapter of this model"),
        ("cut", "cut"),
    ],
)  # fmt: skip
def test_what_is_no_adapter_of_the_model_is_refused(tmp_path: Path, f16: Path, file: str, said: str) -> None:
    other = write_gguf(tmp_path / "other.gguf", "llama", n_layer=4)
    path = {"model": f16, "missing": tmp_path / "none.gguf"}.get(file, tmp_path / f"{file}-adapter.gguf")
    if file == "other":
        write_adapter(path, other)
    elif file == "cut":
        path.write_bytes(write_adapter(tmp_path / "whole.gguf", f16).read_bytes()[:2000])
    told = here("run", f16, "hi", "--device", "none", "--", "--lora", path, code=2).stderr
    assert told.startswith("oallama: ") and said in told and len(told.splitlines()) == 1
