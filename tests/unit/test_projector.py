"""Vision projectors: what they take of memory, and where they lie beside a plan."""

import json
from dataclasses import replace

import placement_records as records
import pytest
from click.testing import CliRunner
from e2e.described_card import profile_file, slow_cpu_fast_card
from gguf_factory import write_gguf
from gguf_factory.projector import write_projector
from hypothesis import given
from hypothesis import strategies as st

from oallama.cli.main import cli
from oallama.cli.projector import ProjectorOptions
from oallama.core.errors import DoesNotFit, ModelFileError
from oallama.core.units import MIB
from oallama.model.projector import Projector, read_projector
from oallama.planner.memory import vram_beside

VIT_L = Projector("l.gguf", 0, 336, 24**2, 1024, 4096, 16)
SIGLIP = Projector("s.gguf", 0, 896, 64**2, 1152, 4304, 16)


@pytest.mark.parametrize(
    ("projector", "flash_attn", "mib"),
    [(VIT_L, True, 19.32), (VIT_L, False, 32.88), (SIGLIP, True, 148.50), (SIGLIP, False, 1123.74)],
)
def test_what_it_computes_in_is_what_llama_server_reserves(projector, flash_attn, mib):
    """`reserve_compute_meta: CPU compute buffer size` of the pinned llama-server for files of these sizes."""
    assert projector.compute_bytes(flash_attn) / MIB == pytest.approx(mib, abs=0.1)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"arch": "llama"}, "a model of architecture 'llama', not a vision projector"),
        ({"leave_out": ("embedding_length",)}, "'clip.vision.embedding_length' is missing"),
        ({"image_size": 14, "patch_size": 28, "leave_out": ()}, "more than a picture"),
        ({"image_max_pixels": 0}, "must be a number from 1"),
    ],
)
def test_what_is_no_vision_projector_is_refused(tmp_path, changes, said):
    path = write_projector(tmp_path / "mmproj.gguf", **changes)
    with pytest.raises(ModelFileError, match=said):
        read_projector(path)


@given(limit=st.integers(2, 2**40), fill=st.floats(0.1, 1.0), share=st.floats(0, 1, exclude_max=True))
def test_room_is_kept_free(limit, fill, share):
    needed = min(int(share * limit), limit - 1)
    planned = int(fill * vram_beside(limit, fill, needed, "X", "something", "use less"))
    assert planned <= limit - needed + 1e-6 * limit
    assert planned >= (limit - needed) * (1 - 1e-6) - 2


def test_what_leaves_nothing_does_not_fit():
    with pytest.raises(DoesNotFit, match=r"something needs .* use less"):
        vram_beside(100, 0.9, 100, "CUDA0", "something", "use less")


@pytest.mark.parametrize(("spare", "side"), [(MIB, "on the device, as the plan leaves 1 MiB free"),
                                             (1024, "on the CPU, as the plan leaves 1 KiB free")])  # fmt: skip
def test_a_plan_says_where_it_is_and_why(tmp_path, spare, side):
    record = records.served().plan
    plan = replace(record, memory=replace(record.memory, spare=spare))
    asked = ProjectorOptions(str(write_projector(tmp_path / "mmproj.gguf")), None)
    placed = asked.placed(plan, memory_kept=False)
    assert placed is not None
    assert placed.on_device == (spare == MIB) and placed.note.endswith(side)
    assert "to encode a picture of 56 x 56," in placed.note
    assert placed.noted(plan).notes == (*record.notes, placed.note)
    assert not asked.placed(records.on_cpu(records.served()).plan, False).on_device


def test_plan_writes_where_it_lies(tmp_path):
    model = write_gguf(tmp_path / "model.gguf", "llama")
    path = write_projector(tmp_path / "mmproj.gguf")
    profile = profile_file(slow_cpu_fast_card(model, 1e9), tmp_path)
    words = ["plan", str(model), "--device", "none", "--policy", "cpu", "-t", "1", "--mmproj", str(path)]
    words += ["--profile", str(profile), "--json"]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, done.output
    (note,) = json.loads(done.stdout)["notes"]
    assert note.endswith("on the CPU") and "the vision projector takes" in note
    assert note in " ".join(done.stderr.split())
