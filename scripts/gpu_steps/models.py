"""The synthetic models of a run: how large, where, written when a step needs them."""

from __future__ import annotations

import math
import shutil
import sys
from pathlib import Path

from gpu_steps.child import ROOT, run_child
from gpu_steps.scale import Shape
from gpu_steps.schedule import WRITE_BYTES_PER_S

BITS = {"F16": 16.0, "Q4_0": 4.5, "Q8_0": 8.5, "Q4_K": 4.5}
SPARE_BYTES = 2 << 30


def model_bytes(shape: Shape) -> int:
    """About what the file will take."""
    from model_shapes import KNOWN

    like = KNOWN[shape.like]
    layer = sum(math.prod(ne) for ne in like.matrices.values())
    values = shape.n_layer * layer + 2 * like.n_vocab * like.n_embd
    return int(values * BITS[shape.type] / 8)


class Models:
    """Model files in one folder."""

    def __init__(self, folder: Path, log: Path) -> None:
        self.folder = folder
        self.log = log

    def path(self, shape: Shape) -> Path:
        return self.folder / f"{shape.name}.gguf"

    def seconds(self, shapes: tuple[Shape, ...]) -> dict[str, float]:
        """Name of each model that is not there -> about what writing it takes."""
        missing = [shape for shape in shapes if not self.path(shape).is_file()]
        return {shape.name: 2.0 + model_bytes(shape) / WRITE_BYTES_PER_S for shape in missing}

    def make(self, shape: Shape, keep: tuple[Shape, ...], limit_s: float) -> str:
        """Write a model that is missing, after removing others than `keep` where the disk is short of room. Returns
        "", or why there is none."""
        path, draft = self.path(shape), self.path(shape).with_suffix(".part")
        if path.is_file():
            return ""
        self.folder.mkdir(parents=True, exist_ok=True)
        for other in sorted(self.folder.glob("*.gguf")):
            if shutil.disk_usage(self.folder).free > model_bytes(shape) + SPARE_BYTES:
                break
            if other not in [self.path(each) for each in keep]:
                other.unlink()
        command = [sys.executable, str(ROOT / "scripts" / "make_model.py"), "--like", shape.like, "--type", shape.type]
        command += ["--layers", str(shape.n_layer), "--quick", "-o", str(draft)]
        ended = run_child(command, limit_s, self.log)
        if ended.status != 0:
            draft.unlink(missing_ok=True)
            return f"{shape.name} was not written: {'no time was left' if ended.late else ended.said}"
        draft.replace(path)
        return ""
