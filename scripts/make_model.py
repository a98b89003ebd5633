#!/usr/bin/env python3
"""Write a GGUF with random weights, of a known model's shape or of any Llama's, for timing and for tests.

The numbers mean nothing, but shapes, types and file layout are those of a real model, and the scale keeps activations
finite, so stock llama.cpp loads and runs it at the speed of a trained one. One layer's random blocks are written for
every layer, so a synthetic 8B takes half a minute:

    scripts/make_model.py --like llama3-8b --type Q4_0 -o llama3-8b-q4_0.gguf
    scripts/make_model.py --like llama2-70b --layers 20 --type Q4_K -o a-quarter-of-it.gguf
    scripts/make_model.py --matrix scripts/matrix/rivals.toml    # the models of a matrix, by their file names
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from model_shapes import KNOWN

from oallama.core.ggml_types import GGML_TYPES_BY_NAME
from oallama.model.roles import tensor_role
from oallama.model.shape_file import ROUTER, begin, tensors, write_empty
from oallama.model.shapes import ModelShape, Ne

Bytes = npt.NDArray[np.uint8]

# Where each type keeps its half-precision scales (byte in the block, ggml-common.h) and what to write there for values
# with a standard deviation of one when all other bits are random; a second scale shifts the mean to zero.
HALF_SCALES: dict[str, tuple[tuple[int, float], ...]] = {
    "Q4_0": ((0, 1 / 4.6),),
    "Q4_1": ((0, 1 / 4.6), (2, -7.5 / 4.6)),
    "Q5_0": ((0, 1 / 9.2),),
    "Q5_1": ((0, 1 / 9.2), (2, -15.5 / 9.2)),
    "Q8_0": ((0, 1 / 74),),
    "Q2_K": ((80, 1 / 15), (82, 1.5 / 15)),
    "Q3_K": ((108, 1 / 44),),
    "Q4_K": ((0, 1 / 310), (2, 7.5 / 310)),
    "Q5_K": ((0, 1 / 640), (2, 15.5 / 640)),
    "Q6_K": ((208, 1 / 1370),),
    "IQ2_XXS": ((0, 1 / 50),),
    "IQ2_XS": ((0, 1 / 50),),
    "IQ2_S": ((0, 1 / 50),),
    "IQ3_XXS": ((0, 1 / 120),),
    "IQ3_S": ((0, 1 / 120),),
    "IQ1_S": ((0, 1 / 8),),
    "IQ4_NL": ((0, 1 / 70),),
    "IQ4_XS": ((0, 1 / 1200),),
    "TQ1_0": ((52, 1 / 0.8),),
    "TQ2_0": ((64, 1 / 1.1),),
    "Q1_0": ((0, 1.0),),
}


def random_blocks(type_name: str, n_blocks: int, sigma: float, rng: np.random.Generator) -> Bytes:
    """Valid random blocks of a ggml type, uint8[n_blocks, block bytes], whose values have a spread of about `sigma`."""
    kind = gguf.GGMLQuantizationType[type_name]
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    if type_name in ("F32", "F16", "BF16"):
        values = (rng.standard_normal((1, n_blocks * block_size), dtype=np.float32) * sigma).astype(np.float32)
        return np.ascontiguousarray(gguf.quants.quantize(values, kind)).view(np.uint8).reshape(n_blocks, block_bytes)
    blocks: Bytes = np.frombuffer(rng.bytes(n_blocks * block_bytes), np.uint8).reshape(n_blocks, block_bytes).copy()
    if type_name in HALF_SCALES:
        for offset, scale in HALF_SCALES[type_name]:
            blocks[:, offset : offset + 2] = np.array([sigma * scale], np.float16).view(np.uint8)
    elif type_name == "IQ1_M":  # its scale is spread over the top four bits of four 16-bit words
        half = int(np.array([sigma / 8.0], np.float16).view(np.uint16)[0])
        for word in range(4):
            byte = 48 + 2 * word + 1
            blocks[:, byte] = (blocks[:, byte] & 0x0F) | (((half >> (4 * word)) & 0xF) << 4)
    elif type_name == "MXFP4":  # a power of two in the first byte
        blocks[:, 0] = 127 + int(np.floor(np.log2(sigma / 4.0)))
    elif type_name == "NVFP4":  # four unsigned E4M3 scales in the first four bytes
        blocks[:, :4] = 0x08
    else:
        raise ValueError(f"{type_name} is not a weight type")
    return blocks


QUICK_BYTES = 16 << 20
"""What is drawn of a matrix in the quick way; the rest repeats it. Beyond any core's own cache."""


def write_shape(
    path: str | Path,
    shape: ModelShape,
    type: str = "Q4_0",
    *,
    quick: bool = False,
    empty: bool = False,
    name: str | None = None,
) -> Path:
    """Write a model of that shape to `path` and return it. All matrices are of ggml type `type`, a router of F32, whose
    expert e reads feature e; untied embeddings; norms are ones, biases zeros. quick: large matrices repeat QUICK_BYTES
    of random blocks, so that writing takes what the disk takes. empty: a hole in the place of the weights, for what
    only reads headers. name: that the file states. Raises ValueError for rows that the type cannot hold, KeyError for
    an unknown type."""
    path, name = Path(path), name or f"random {shape.arch}, {shape.n_layer} layers"
    if empty:
        return write_empty(path, shape, type, name)
    rng, block = np.random.default_rng(0), GGML_TYPES_BY_NAME[type]
    writer = begin(path, shape, type, name)

    def matrix(ne: Ne) -> Bytes:
        """Random weights of ne `ne`, as bytes [..., rows, row bytes]."""
        n_blocks = int(np.prod(ne)) // block.block_size
        n_drawn = min(n_blocks, QUICK_BYTES // block.block_bytes) if quick else n_blocks
        blocks = random_blocks(type, n_drawn, ne[0] ** -0.5, rng)
        if n_drawn < n_blocks:
            blocks = np.resize(blocks, (n_blocks, block.block_bytes))
        return blocks.reshape(*reversed(ne[1:]), ne[0] // block.block_size * block.block_bytes)

    matrices = shape.matrices | shape.dense | {role: ne for role, ne in shape.mtp.items() if len(ne) > 1}
    drawn = {role: matrix(ne) for role, ne in matrices.items() if role != ROUTER}
    embedding = matrix((shape.n_embd, shape.n_vocab))

    def data(name: str, ne: Ne) -> npt.NDArray[Any]:
        role, suffix = tensor_role(name).role, name.rpartition(".")[2]
        if suffix == "bias":
            return np.zeros(ne[::-1], np.float32)
        if role in ("token_embd", "output"):
            return embedding
        if role == ROUTER:
            return np.eye(*ne[::-1], dtype=np.float32)
        return drawn[role] if role in drawn else np.ones(ne[::-1], np.float32)

    for tensor, ne, _ in tensors(shape, type):
        writer.write_tensor_data(data(tensor, ne))
    writer.close()
    return path


NAMED = re.compile(r"(?P<like>.+?)(?:-(?P<layers>\d+)l)?-(?P<type>[A-Za-z0-9_]+)")
"""A file name that says what is in it: llama3-8b-q4_0, llama3-8b-6l-f16."""


def named(path: Path) -> tuple[ModelShape, str]:
    """Shape and type that the name of a file says. Raises ValueError."""
    match = NAMED.fullmatch(path.stem)
    if not match or match["like"] not in KNOWN:
        raise ValueError(f"{path} is missing, and its name is not a known shape, e.g. llama3-8b-6l-f16.gguf")
    return KNOWN[match["like"]].with_layers(int(match["layers"]) if match["layers"] else None), match["type"].upper()


def models_of(matrix: Path) -> list[Path]:
    """The models that the settings of a matrix of `oallama bench` name and that are not there. Raises ValueError."""
    import tomllib

    values = [setting.get("model", []) for setting in tomllib.loads(matrix.read_text(encoding="utf-8"))["setting"]]
    paths = [Path(name) for value in values for name in ([value] if isinstance(value, str) else value)]
    return [path for path in dict.fromkeys(paths) if not path.exists()]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--like", choices=sorted(KNOWN), metavar="MODEL", help=f"one of: {', '.join(sorted(KNOWN))}")
    parser.add_argument("--layers", type=int, help="number of layers; default: the model's")
    parser.add_argument("--type", default="Q4_0", help="ggml type of the matrices: F16, Q4_0, Q4_K, ... (default Q4_0)")
    parser.add_argument("--quick", action="store_true", help="repeat 16 MiB of random blocks in each large matrix")
    parser.add_argument("--empty", action="store_true", help="write only headers, with a hole for the weights")
    parser.add_argument("--matrix", type=Path, metavar="FILE.toml", help="write the missing models that it names")
    parser.add_argument("-o", "--output", type=Path)
    o = parser.parse_args(arguments)
    if (o.matrix is None) == (o.like is None or o.output is None):
        parser.error("give either --like and -o, or --matrix")
    if o.type not in gguf.GGMLQuantizationType.__members__:
        parser.error(f"{o.type} is not a ggml type")
    if o.layers is not None and o.layers < 1:
        parser.error("a model needs at least one layer")
    try:
        if o.matrix is None:
            models = {o.output: (KNOWN[o.like].with_layers(o.layers), o.type)}
        else:
            models = {path: named(path) for path in models_of(o.matrix)}
        for path, (shape, type) in models.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            name = o.like if o.empty else None  # nothing of it is random
            write_shape(path, shape, type, quick=o.quick, empty=o.empty, name=name)
            print(f"{path}: {path.stat().st_size / 1e6:.1f} MB", file=sys.stderr)
    except (ValueError, OSError) as error:
        print(f"make_model: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
