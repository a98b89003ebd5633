"""Writes small random vision projectors, as llama-server takes them with --mmproj: a CLIP encoder and a LLaVA MLP."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

TEXT_EMBD = 256  # of the models that write_gguf writes


def write_projector(
    path: str | Path, *, arch: str = "clip", image_size: int = 56, patch_size: int = 14,
    leave_out: tuple[str, ...] = (), **metadata: int,
) -> Path:  # fmt: skip
    """leave_out: keys. metadata: more numbers below `clip.vision.`."""
    n_layer, n_embd, n_ff, n_patches = 2, 64, 128, (image_size // patch_size) ** 2
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_type("mmproj")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", "mlp")
    writer.add_bool("clip.use_gelu", True)
    sizes = {
        "image_size": image_size, "patch_size": patch_size, "embedding_length": n_embd, "feed_forward_length": n_ff,
        "block_count": n_layer, "attention.head_count": 4, "projection_dim": TEXT_EMBD, **metadata,
    }  # fmt: skip
    for name, value in sizes.items():
        if name not in leave_out:
            writer.add_uint32(f"clip.vision.{name}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
    writer.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
    writer.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])
    rng = np.random.default_rng(0)

    def tensor(name: str, *shape: int, dtype: type = np.float16) -> None:
        writer.add_tensor(name, (0.02 * rng.standard_normal(shape)).astype(dtype))

    def linear(name: str, n_in: int, n_out: int) -> None:
        tensor(f"{name}.weight", n_out, n_in)
        tensor(f"{name}.bias", n_out, dtype=np.float32)

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(n_embd, np.float32))
        writer.add_tensor(f"{name}.bias", np.zeros(n_embd, np.float32))

    tensor("v.patch_embd.weight", n_embd, 3, patch_size, patch_size)
    tensor("v.class_embd", n_embd, dtype=np.float32)
    tensor("v.position_embd.weight", n_patches + 1, n_embd, dtype=np.float32)
    for name in ("v.pre_ln", "v.post_ln"):
        norm(name)
    for blk in (f"v.blk.{i}" for i in range(n_layer)):
        for role in ("attn_q", "attn_k", "attn_v", "attn_out"):
            linear(f"{blk}.{role}", n_embd, n_embd)
        linear(f"{blk}.ffn_up", n_embd, n_ff)
        linear(f"{blk}.ffn_down", n_ff, n_embd)
        norm(f"{blk}.ln1")
        norm(f"{blk}.ln2")
    linear("mm.0", n_embd, TEXT_EMBD)
    linear("mm.2", TEXT_EMBD, TEXT_EMBD)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)
