"""Vision projectors: what they take of memory, and where they lie beside a plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import placement_records as records
import pytest
from click.testing import CliRunner
from gguf_factory import write_gguf
from gguf_factory.projector import write_projector
from hypothesis import given
from hypothesis import strategies as st

from oallama.cli.main import cli
from oallama.cli.projector import ProjectorOptions
from oallama.core.errors import DoesNotFit, ModelFileError
from oallama.core.units import MIB
from oallama.model.projector import Projector, read_projector
from oallama.place.memory import fits_beside, vram_beside

VIT_L = Projector("l.gguf", "mlp", 0, 336, 24**2, 1024, 4096, 16)
SIGLIP = Projector("s.gguf", "mlp", 0, 896, 64**2, 1152, 4304, 16)


@pytest.mark.parametrize(
    ("projector", "flash_attn", "mib"),
    [(VIT_L, True, 19.32), (VIT_L, False, 32.88), (SIGLIP, True, 148.50), (SIGLIP, False, 1123.74)],
)
def test_what_it_computes_in_is_what_llama_server_reserves(projector: Projector, flash_attn: bool, mib: float) -> None:
    """`reserve_compute_meta: CPU compute buffer size` of the pinned llama-server for files of these sizes."""
    assert projector.compute_bytes(flash_attn) / MIB == pytest.approx(mib, abs=0.1)


@pytest.mark.parametrize(("flash_attn", "mib"), [(True, 21.22), (False, 273.35)])
def test_no_less_is_counted_where_the_picture_is_larger_than_its_rows(flash_attn: bool, mib: float) -> None:
    """As above; ggml reuses the picture's memory there, so that less is reserved than is counted."""
    made = Projector("x.gguf", "mlp", 0, 896, 64**2, 256, 512, 4)
    assert mib <= made.compute_bytes(flash_attn) / MIB < 1.6 * mib


def test_it_is_read_from_the_header(tmp_path: Path) -> None:
    made = read_projector(write_projector(tmp_path / "mmproj.gguf", n_ff=96))
    assert (made.type, made.edge, made.n_patches, made.n_embd, made.n_ff, made.n_head) == ("mlp", 56, 16, 64, 96, 4)
    assert 0 < made.weight_bytes < (tmp_path / "mmproj.gguf").stat().st_size
    large = read_projector(write_projector(tmp_path / "large.gguf", image_max_pixels=112**2))
    assert (large.edge, large.n_patches) == (112, 64)  # the largest picture that it is made for


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"arch": "llama"}, "a model of architecture 'llama' and no vision projector"),
        ({"leave_out": ("embedding_length",)}, "'clip.vision.embedding_length' is missing"),
        ({"image_size": 14, "patch_size": 28, "leave_out": ()}, "more than the 14"),
        ({"image_max_pixels": 0}, "must be a number from 1"),
    ],
)
def test_what_is_no_vision_projector_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    path = write_projector(tmp_path / "mmproj.gguf", **changes)
    with pytest.raises(ModelFileError, match=said):
        read_projector(path)


def test_a_file_that_is_cut_is_refused(tmp_path: Path) -> None:
    path = write_projector(tmp_path / "mmproj.gguf")
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ModelFileError):
        read_projector(path)


def test_it_goes_where_there_is_room_unless_it_is_asked_for() -> None:
    memory = records.served().plan.memory
    assert fits_beside(memory, memory.spare, None) and not fits_beside(memory, memory.spare + 1, None)
    assert fits_beside(memory, memory.spare + 1, True) and not fits_beside(memory, 1, False)


@given(limit=st.integers(2, 2**40), fill=st.floats(0.1, 1.0), share=st.floats(0, 1, exclude_max=True))
def test_room_that_is_kept_free_is_the_projector_s(limit: int, fill: float, share: float) -> None:
    needed = min(int(share * limit), limit - 1)
    planned = int(fill * vram_beside(limit, fill, needed, "X"))
    assert planned <= limit - needed + 1e-6 * limit
    assert planned >= (limit - needed) * (1 - 1e-6) - 2


def test_a_projector_that_leaves_nothing_does_not_fit() -> None:
    with pytest.raises(DoesNotFit, match=r"the vision projector needs .* \(--no-mmproj-offload\)"):
        vram_beside(100, 0.9, 100, "CUDA0")


@pytest.mark.parametrize(("spare", "side"), [(MIB, "on the device, as the plan leaves 1 MiB there"),
                                             (1024, "on the CPU, as the plan leaves 1 KiB there")])  # fmt: skip
def test_a_plan_says_where_it_is_and_why(tmp_path: Path, spare: int, side: str) -> None:
    record = records.served().plan
    plan = replace(record, memory=replace(record.memory, spare=spare))
    asked = ProjectorOptions(str(write_projector(tmp_path / "mmproj.gguf")), None)
    placed = asked.place(asked.read(), plan, memory_kept=False)
    assert placed.on_device == (spare == MIB) and placed.note.endswith(side)
    assert "to encode a picture of 56 x 56 in" in placed.note
    assert placed.noted(plan).notes == (*record.notes, placed.note)
    assert not asked.place(asked.read(), records.on_cpu(records.served()).plan, False).on_device


def test_inspect_tells_what_it_takes(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "model.gguf", "llama")
    path = write_projector(tmp_path / "mmproj.gguf")
    done = CliRunner().invoke(cli, ["inspect", str(model), "--mmproj", str(path), "--json"])
    told = json.loads(done.stdout)["projector"]
    read = read_projector(path)
    assert (told["weight_bytes"], told["compute_bytes"]) == (read.weight_bytes, read.compute_bytes(True))
    assert told["plain_compute_bytes"] == read.compute_bytes(False)
    shown = CliRunner().invoke(cli, ["inspect", str(model), "-mm", str(path)]).stdout
    assert "vision projector mlp: " in shown and "to encode a picture of 56 x 56" in shown
    assert "projector" not in json.loads(CliRunner().invoke(cli, ["inspect", str(model), "--json"]).stdout)


def test_plan_writes_where_it_lies(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "model.gguf", "llama")
    path = write_projector(tmp_path / "mmproj.gguf")
    words = ["plan", str(model), "--device", "none", "--policy", "cpu", "-t", "1", "--mmproj", str(path)]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, done.output
    (note,) = json.loads(done.stdout)["notes"]
    assert note.endswith("on the CPU") and "the vision projector takes" in note
    assert note in done.stderr
