"""Writes small random vision projectors, as llama-server takes them with --mmproj: a CLIP encoder and a LLaVA MLP."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

TEXT_EMBD = 256  # of the models that write_gguf writes


def write_projector(
    path: str | Path,
    *,
    n_layer: int = 2,
    n_embd: int = 64,
    n_ff: int = 128,
    n_head: int = 4,
    image_size: int = 56,
    patch_size: int = 14,
    projection: int = TEXT_EMBD,
    arch: str = "clip",
    leave_out: tuple[str, ...] = (),
    **metadata: int,
) -> Path:
    """projection: n_embd of the language model. leave_out: keys. metadata: more numbers below `clip.vision.`."""
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_type("mmproj")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", "mlp")
    writer.add_bool("clip.use_gelu", True)
    sizes = {
        "image_size": image_size, "patch_size": patch_size, "embedding_length": n_embd, "feed_forward_length": n_ff,
        "block_count": n_layer, "attention.head_count": n_head, "projection_dim": projection, **metadata,
    }  # fmt: skip
    for name, value in sizes.items():
        if name not in leave_out:
            writer.add_uint32(f"clip.vision.{name}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
    writer.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
    writer.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])
    rng = np.random.default_rng(0)

    def matrix(name: str, *shape: int, dtype: type = np.float16) -> None:
        writer.add_tensor(name, (0.02 * rng.standard_normal(shape)).astype(dtype))

    def linear(name: str, n_in: int, n_out: int) -> None:
        matrix(f"{name}.weight", n_out, n_in)
        matrix(f"{name}.bias", n_out, dtype=np.float32)

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(n_embd, np.float32))
        writer.add_tensor(f"{name}.bias", np.zeros(n_embd, np.float32))

    n_patches = (image_size // patch_size) ** 2
    matrix("v.patch_embd.weight", n_embd, 3, patch_size, patch_size)
    matrix("v.class_embd", n_embd, dtype=np.float32)
    matrix("v.position_embd.weight", n_patches + 1, n_embd, dtype=np.float32)
    norm("v.pre_ln")
    norm("v.post_ln")
    for i in range(n_layer):
        for role in ("attn_q", "attn_k", "attn_v", "attn_out"):
            linear(f"v.blk.{i}.{role}", n_embd, n_embd)
        linear(f"v.blk.{i}.ffn_up", n_embd, n_ff)
        linear(f"v.blk.{i}.ffn_down", n_ff, n_embd)
        norm(f"v.blk.{i}.ln1")
        norm(f"v.blk.{i}.ln2")
    linear("mm.0", n_embd, projection)
    linear("mm.2", projection, projection)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)
