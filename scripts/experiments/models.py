"""The synthetic models of an experiment: how large, where, written when a step needs them."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from model_shapes import KNOWN

from experiments.child import ROOT, run_child

BITS = {"F16": 16.0, "Q4_0": 4.5, "Q8_0": 8.5, "Q4_K": 4.5}
SPARE_BYTES = 2 << 30
WRITE_BYTES_PER_S = 1.0e9  # a synthetic model, random blocks included


@dataclass(frozen=True)
class Shape:
    """A model with random weights: --like of scripts/make_model.py, its type, how many of its layers (None: all)."""

    like: str
    type: str = "Q4_0"
    n_layer: int | None = None

    @property
    def name(self) -> str:
        """As the file is called."""
        layers = f"-{self.n_layer}l" if self.n_layer else ""
        return f"{self.like}{layers}-{self.type.lower()}"

    @property
    def share(self) -> float:
        """Of the real model's layers."""
        return self.layers / KNOWN[self.like].n_layer

    @property
    def layers(self) -> int:
        return self.n_layer or KNOWN[self.like].n_layer

    @property
    def n_bytes(self) -> int:
        """About what the file will take."""
        like = KNOWN[self.like]
        layer = sum(math.prod(ne) for ne in like.matrices.values())
        return int((self.layers * layer + 2 * like.n_vocab * like.n_embd) * BITS[self.type] / 8)


class Models:
    """Model files in one folder. quick: what is drawn of large matrices is repeated."""

    def __init__(self, folder: Path, log: Path, quick: bool = False) -> None:
        self.folder = folder
        self.log = log
        self.quick = quick

    def path(self, shape: Shape) -> Path:
        return self.folder / f"{shape.name}.gguf"

    def seconds(self, shapes: Sequence[Shape]) -> dict[str, float]:
        """Name of each model that is not there -> about what writing it takes."""
        missing = [shape for shape in shapes if not self.path(shape).is_file()]
        return {shape.name: 2.0 + shape.n_bytes / WRITE_BYTES_PER_S for shape in missing}

    def make_room(self, shape: Shape, keep: Sequence[Shape]) -> None:
        """Remove other models than `keep` while the disk is too full for one more."""
        for other in sorted(self.folder.glob("*.gguf")):
            if shutil.disk_usage(self.folder).free > shape.n_bytes + SPARE_BYTES:
                break
            if other not in [self.path(each) for each in keep]:
                other.unlink()

    def make(self, shape: Shape, limit_s: float | None = None) -> str:
        """Write a model that is missing, whole or not at all. Returns "", or why there is none."""
        path, draft = self.path(shape), self.path(shape).with_suffix(".part")
        if path.is_file():
            return ""
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(ROOT / "scripts" / "make_model.py"), "--like", shape.like, "--type", shape.type]
        command += ["--layers", str(shape.n_layer)] if shape.n_layer else []
        ended = run_child([*command, *(["--quick"] if self.quick else []), "-o", str(draft)], limit_s, self.log)
        if ended.status != 0:
            draft.unlink(missing_ok=True)
            return f"{shape.name} was not written: {ended.why}"
        draft.replace(path)
        return ""
