"""The network in torch: Llama (Touvron et al. 2023) as llama.cpp computes it for general.architecture = "llama".

RMSNorm before each half of a block (Zhang & Sennrich 2019), rotary positions on neighbouring pairs (Su et al. 2021),
grouped-query attention (Ainslie et al. 2023), SwiGLU (Shazeer 2020); with experts, Mixtral's FFN (Jiang et al. 2024).
Weights are [out, in]; module names are the GGUF tensor names, with an expert's number behind those of experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Shape:
    """Hyperparameters; head size is n_embd / n_head. n_ff is one expert's where there are experts (n_expert > 0)."""

    n_vocab: int
    n_ctx: int = 512
    n_embd: int = 256
    n_layer: int = 6
    n_ff: int = 512
    n_head: int = 8
    n_head_kv: int = 2
    norm_eps: float = 1e-5
    rope_base: float = 10000.0
    n_expert: int = 0
    n_expert_used: int = 0

    @property
    def n_rot(self) -> int:
        return self.n_embd // self.n_head


class Block(nn.Module):
    """One transformer block."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        n_kv = shape.n_head_kv * shape.n_rot
        self.attn_norm = nn.RMSNorm(shape.n_embd, eps=shape.norm_eps)
        self.attn_q = nn.Linear(shape.n_embd, shape.n_embd, bias=False)
        self.attn_k = nn.Linear(shape.n_embd, n_kv, bias=False)
        self.attn_v = nn.Linear(shape.n_embd, n_kv, bias=False)
        self.attn_output = nn.Linear(shape.n_embd, shape.n_embd, bias=False)
        self.ffn_norm = nn.RMSNorm(shape.n_embd, eps=shape.norm_eps)
        self.add_ffn(shape)

    def add_ffn(self, shape: Shape) -> None:
        self.ffn_gate = nn.Linear(shape.n_embd, shape.n_ff, bias=False)
        self.ffn_up = nn.Linear(shape.n_embd, shape.n_ff, bias=False)
        self.ffn_down = nn.Linear(shape.n_ff, shape.n_embd, bias=False)

    def forward(self, x: Tensor, turn: Tensor, mask: Tensor) -> Tensor:
        """x [batch, time, n_embd], turn [time, n_rot / 2] complex, mask [batch, 1, time, time] (true: may look)."""
        x = x + self.attend(self.attn_norm(x), turn, mask)
        return x + self.ffn(self.ffn_norm(x))

    def ffn(self, h: Tensor) -> Tensor:
        return self.ffn_down(F.silu(self.ffn_gate(h)) * self.ffn_up(h))

    def attend(self, h: Tensor, turn: Tensor, mask: Tensor) -> Tensor:
        shape, (batch, time, _) = self.shape, h.shape
        q, k, v = (
            project(h).view(batch, time, -1, shape.n_rot).transpose(1, 2)
            for project in (self.attn_q, self.attn_k, self.attn_v)
        )
        groups = shape.n_head // shape.n_head_kv
        k, v = (rotate(k, turn).repeat_interleave(groups, 1), v.repeat_interleave(groups, 1))
        a = F.scaled_dot_product_attention(rotate(q, turn), k, v, attn_mask=mask)
        return self.attn_output(a.transpose(1, 2).reshape(batch, time, -1))


class ExpertBlock(Block):
    """A block whose FFN is a mixture of experts: softmax over all experts, the n_expert_used best, weights that add
    up to 1. `balance_loss` and `z_loss` are those of the last batch."""

    def add_ffn(self, shape: Shape) -> None:
        def experts(n_in: int, n_out: int) -> nn.ModuleList:
            return nn.ModuleList(nn.Linear(n_in, n_out, bias=False) for _ in range(shape.n_expert))

        self.ffn_gate_inp = nn.Linear(shape.n_embd, shape.n_expert, bias=False)
        self.ffn_gate_exps = experts(shape.n_embd, shape.n_ff)
        self.ffn_up_exps = experts(shape.n_embd, shape.n_ff)
        self.ffn_down_exps = experts(shape.n_ff, shape.n_embd)
        self.balance_loss = self.z_loss = torch.zeros(())

    def ffn(self, h: Tensor) -> Tensor:
        shape, x = self.shape, h.flatten(0, 1)
        with torch.autocast("cpu", enabled=False):
            logits = self.ffn_gate_inp(x.float())
        probabilities = logits.softmax(-1)
        weights, ids = probabilities.topk(shape.n_expert_used)
        weights = weights / weights.sum(-1, keepdim=True)
        counts = torch.bincount(ids.flatten(), minlength=shape.n_expert)
        # Fedus et al. 2021, equations 4 to 6, for several experts a token; Zoph et al. 2022, equation 5
        self.balance_loss = shape.n_expert * (counts / counts.sum() * probabilities.mean(0)).sum()
        self.z_loss = logits.logsumexp(-1).square().mean()
        by_expert = ids.flatten().argsort(stable=True)
        token = by_expert // shape.n_expert_used
        results = [
            down(F.silu(gate(part)) * up(part))
            for gate, up, down, part in zip(
                self.ffn_gate_exps, self.ffn_up_exps, self.ffn_down_exps, x[token].split(counts.tolist()), strict=True
            )
        ]
        weighted = torch.cat(results) * weights.flatten()[by_expert, None]
        return torch.zeros_like(x, dtype=weighted.dtype).index_add(0, token, weighted).view(h.shape)


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Turn each neighbouring pair (x[2i], x[2i+1]) of the last dimension by its angle; x [batch, head, time, n_rot]."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)


class Llama(nn.Module):
    """Token ids [batch, time] to logits [batch, time, n_vocab]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.token_embd = nn.Embedding(shape.n_vocab, shape.n_embd)
        block = ExpertBlock if shape.n_expert > 0 else Block
        self.blk = nn.ModuleList(block(shape) for _ in range(shape.n_layer))
        self.output_norm = nn.RMSNorm(shape.n_embd, eps=shape.norm_eps)
        self.output = nn.Linear(shape.n_embd, shape.n_vocab, bias=False)
        frequencies = shape.rope_base ** (-torch.arange(0, shape.n_rot, 2) / shape.n_rot)
        angles = torch.outer(torch.arange(shape.n_ctx), frequencies)
        self.register_buffer("turn", torch.polar(torch.ones_like(angles), angles), persistent=False)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                into_residual = "attn_output" in name or "ffn_down" in name
                nn.init.normal_(weight, std=0.02 / (math.sqrt(2 * shape.n_layer) if into_residual else 1.0))

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """mask [batch, 1, time, time]: which positions may be looked at; default: all up to the present one."""
        time = ids.shape[1]
        if mask is None:
            mask = torch.ones(time, time, dtype=torch.bool).tril()[None, None]
        x = self.token_embd(ids)
        for block in self.blk:
            x = block(x, self.turn[:time], mask)
        return self.output(self.output_norm(x))
