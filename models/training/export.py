"""GGUF files of the trained network: in F16, in Q4_0."""

from __future__ import annotations

import re
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from .documents import ASSISTANT, END, USER
from .network import Llama, Shape
from .tokenizer import BEGIN, END_OF_TEXT, Tokenizer

DESCRIPTION = (
    "Small stories, small sums, and questions about both, from a probabilistic grammar; trained by models/train.py."
)
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] in ['user', 'assistant'] %}"
    "{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
MARKS = (BEGIN, END_OF_TEXT, USER, ASSISTANT, END)
FILE_TYPES = {"f16": gguf.LlamaFileType.MOSTLY_F16, "q4_0": gguf.LlamaFileType.MOSTLY_Q4_0}
FILES = {"stories": ("f16", "q4_0"), "stories-moe": ("q4_0",)}


def export(network: Llama, tokenizer: Tokenizer, model: str, folder: Path) -> list[Path]:
    """Write a model's files (each at once: a file is complete or not there) and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = stacked({name: weight.detach().float().numpy() for name, weight in network.state_dict().items()})
    paths = []
    for suffix in FILES[model]:
        path = folder / f"oallama-{model}-{suffix}.gguf"
        part = path.with_suffix(".part")
        write(part, f"oallama {model}", FILE_TYPES[suffix], network.shape, weights, tokenizer)
        part.replace(path)
        paths.append(path)
    return paths


def stacked(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Experts' matrices `NAME_exps.E.weight` [out, in] as one tensor `NAME_exps.weight` [E, out, in]."""
    made: dict[str, np.ndarray] = {}
    for name, weight in weights.items():
        experts = re.fullmatch(r"(.*_exps)\.(\d+)\.weight", name)
        if experts is None:
            made[name] = weight
        elif experts[2] == "0":
            names = (name for name in weights if name.startswith(f"{experts[1]}."))
            made[f"{experts[1]}.weight"] = np.stack([weights[name] for name in names])
    return made


def write(
    path: Path, name: str, file_type: int, shape: Shape, weights: dict[str, np.ndarray], tokenizer: Tokenizer
) -> None:
    """Write one GGUF file; weights are [out, in], of experts [E, out, in], in F32 under their GGUF names."""
    writer = gguf.GGUFWriter(path, "llama")
    add_metadata(writer, name, file_type, shape, sum(w.size for w in weights.values()))
    add_tokenizer(writer, tokenizer)
    for tensor, weight in weights.items():
        kind = tensor_type(tensor, weight, file_type)
        writer.add_tensor(tensor, gguf.quants.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensor_type(name: str, weight: np.ndarray, file_type: int) -> Type:
    """Norms and routers are F32; with Q4_0 the two vocabulary matrices are Q8_0, for they are small and sensitive."""
    if weight.ndim == 1 or "ffn_gate_inp" in name:
        return Type.F32
    if file_type == gguf.LlamaFileType.MOSTLY_F16:
        return Type.F16
    return Type.Q8_0 if name in ("token_embd.weight", "output.weight") else Type.Q4_0


def add_metadata(writer: gguf.GGUFWriter, name: str, file_type: int, shape: Shape, n_weights: int) -> None:
    """Who made it, and its hyperparameters."""
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(name)
    writer.add_description(DESCRIPTION)
    writer.add_license("mit")
    writer.add_languages(["en"])
    writer.add_size_label(f"{n_weights / 1e6:.1f}M")
    writer.add_file_type(file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(shape.n_vocab)
    writer.add_context_length(shape.n_ctx)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(shape.n_layer)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_rope_dimension_count(shape.n_rot)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    if shape.n_expert > 0:
        writer.add_expert_count(shape.n_expert)
        writer.add_expert_used_count(shape.n_expert_used)


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer) -> None:
    """Tokens, merges, marks and the chat template."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokenizer.tokens)
    writer.add_token_types(
        [gguf.TokenType.CONTROL if token in tokenizer.marks else gguf.TokenType.NORMAL for token in tokenizer.tokens]
    )
    writer.add_token_merges([" ".join(pair) for pair in tokenizer.merges])
    writer.add_bos_token_id(tokenizer.id_of(BEGIN))
    writer.add_eos_token_id(tokenizer.id_of(END_OF_TEXT))
    writer.add_eot_token_id(tokenizer.id_of(END))
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
