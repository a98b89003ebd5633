"""The training loop: optimizer, schedule, checkpoints, validation."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .batches import Batch, padded_batch, tokens_of, training_batch
from .documents import sample_document
from .network import ExpertBlock, Llama, Shape
from .tokenizer import Tokenizer

VALIDATION_SEED_OFFSET = 1_000_003
MODELS: dict[str, dict[str, int]] = {  # what differs from Shape's defaults
    "stories": {},
    "stories-moe": {"n_embd": 192, "n_layer": 4, "n_ff": 64, "n_head": 6, "n_expert": 16, "n_expert_used": 2},
}


@dataclass(frozen=True)
class Settings:
    """Everything that decides the result; a checkpoint goes on only with the same settings."""

    steps: int
    seed: int
    rows: int = 14
    time: int = 384
    n_vocab: int = 768
    matrix_rate: float = 3e-3
    other_rate: float = 3e-3
    warmup_steps: int = 40
    weight_decay: float = 0.05
    model: str = "stories"
    balance_loss: float = 0.01  # its weight, summed over the layers; as Mixtral and OLMoE (Muennighoff et al. 2024)
    z_loss: float = 0.001


@dataclass
class Progress:
    """What a run has done; seconds are summed over interrupted runs."""

    step: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    curve: list[dict[str, float]] = field(default_factory=list)


class Trainer:
    """Network, optimizers and progress of one run."""

    def __init__(self, settings: Settings, tokenizer: Tokenizer, precision: str = "bf16") -> None:
        """precision: "bf16" (mixed: weights and optimizers stay f32) or "f32"."""
        torch.manual_seed(settings.seed)
        self.precision = precision
        self.settings, self.tokenizer, self.progress = settings, tokenizer, Progress()
        self.network = Llama(Shape(n_vocab=len(tokenizer.tokens), **MODELS[settings.model]))
        self.optimizers = make_optimizers(self.network, settings)

    def train_step(self) -> float:
        """One step; returns its loss in nats per token."""
        settings, wall, cpu = self.settings, time.perf_counter(), time.process_time()
        scale = schedule(self.progress.step, settings)
        batch = training_batch(self.tokenizer, settings.seed, self.progress.step, settings.rows, settings.time)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.precision == "bf16"):
            logits = self.network(batch.ids, batch.mask)
        loss = cross_entropy(logits, batch).sum() / (batch.targets >= 0).sum()
        (loss + self.router_loss()).backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["full_rate"] * scale
            optimizer.step()
            optimizer.zero_grad()
        self.progress.step += 1
        self.progress.wall_s += time.perf_counter() - wall
        self.progress.cpu_s += time.process_time() - cpu
        return float(loss.detach())

    def router_loss(self) -> Tensor | float:
        """What keeps the experts of the last batch in use, weighted; 0 for a network without experts."""
        blocks = [block for block in self.network.blk if isinstance(block, ExpertBlock)]
        settings = self.settings
        return sum(settings.balance_loss * b.balance_loss + settings.z_loss * b.z_loss for b in blocks)

    def save(self, path: Path) -> None:
        """Write a checkpoint that is either complete or not there."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        state = {
            "settings": asdict(self.settings),
            "progress": asdict(self.progress),
            "network": self.network.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        torch.save(state, part)
        part.replace(path)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint. ValueError if it cannot be read or was made with other settings."""
        try:
            state: dict[str, Any] = torch.load(path, weights_only=True)
        except (RuntimeError, EOFError, UnpicklingError) as error:
            raise ValueError(f"{path} is no checkpoint of this program ({error}); delete it to start anew") from error
        if state["settings"] != asdict(self.settings):
            raise ValueError(
                f"{path} was made with other settings ({state['settings']}); use these or another --work-dir"
            )
        self.progress = Progress(**state["progress"])
        self.network.load_state_dict(state["network"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)


def make_optimizers(network: Llama, settings: Settings) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al. 2024) for the matrices of the blocks, AdamW for embeddings, output, norms and routers."""

    def is_matrix(name: str, weight: Tensor) -> bool:
        return name.startswith("blk.") and weight.ndim == 2 and "ffn_gate_inp" not in name

    matrices = [w for name, w in network.named_parameters() if is_matrix(name, w)]
    others = [w for name, w in network.named_parameters() if not is_matrix(name, w)]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(
            matrices, lr=settings.matrix_rate, weight_decay=settings.weight_decay, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, lr=settings.other_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["full_rate"] = group["lr"]
    return optimizers


def schedule(step: int, settings: Settings) -> float:
    """Share of the full rate: linear warm-up, two thirds of half a cosine, and from 40 % on a line to zero."""
    warmup = min(1.0, (step + 1) / settings.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * step / (1.5 * settings.steps)))
    return warmup * cosine * min(1.0, (settings.steps - step) / (0.6 * settings.steps))


def cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    """Nats of each place, 0 where nothing counts; logits [row, time, n_vocab], result [row, time]."""
    nats = F.cross_entropy(logits.float().flatten(0, 1), batch.targets.flatten(), ignore_index=-1, reduction="none")
    return nats.view(batch.targets.shape)


@torch.no_grad()
def validate(
    network: Llama, tokenizer: Tokenizer, seed: int, n_documents: int, tick: Callable[[], object]
) -> dict[str, float]:
    """Cross-entropy of the network and entropy of the grammar, in nats, on documents of another seed."""
    documents = [sample_document(seed + VALIDATION_SEED_OFFSET, i) for i in range(n_documents)]
    rows = sorted(((tokens_of(d, tokenizer), d.nats) for d in documents), key=lambda row: len(row[0]))
    model: list[float] = []
    for i in range(0, len(rows), 20):
        batch = padded_batch([tokens for tokens, _ in rows[i : i + 20]])
        model.extend(cross_entropy(network(batch.ids, batch.mask), batch).sum(1).tolist())
        tick()
    n_tokens, n_chars = sum(len(tokens) - 1 for tokens, _ in rows), sum(len(d.text) for d in documents)
    gaps = torch.tensor(model) - torch.tensor([nats for _, nats in rows])
    bound, total = math.fsum(d.nats for d in documents), math.fsum(model)
    return {
        "documents": n_documents,
        "tokens": n_tokens,
        "characters": n_chars,
        "model_nats_per_token": total / n_tokens,
        "grammar_nats_per_token": bound / n_tokens,
        "model_nats_per_character": total / n_chars,
        "grammar_nats_per_character": bound / n_chars,
        "gap_nats_per_document": float(gaps.mean()),
        "gap_standard_error": float(gaps.std() / math.sqrt(n_documents)),
    }
