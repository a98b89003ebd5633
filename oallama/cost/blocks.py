"""Blocks, the units that the split back end computes: a whole FFN, its gate and up, or a single mul-mat.

Gate, up and down of an FFN that are cut at the same element form one block: each side computes its slice of the whole
FFN, inputs are sent once and partial sums are joined once (ScheInfer III-B, Eq. 1 and 2). Gate and up alone form a
block whose result is the GLU's. Every other mul-mat is a block by itself, also those of an FFN that are cut at
different elements.

A run is a sequence of blocks between which llama.cpp computes nothing. The split back end holds the inputs and results
of all its blocks until the run ends.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

from oallama.core.types import Operator
from oallama.core.units import KIB
from oallama.model.cut import cut_axis, cut_extent, cut_granularity, cut_step, runs_alone

F32 = 4  # bytes of one activation element

_FFN_ROLE = re.compile(r"((?:enc\.|dec\.)?)ffn_(gate_up|gate|up|down)(|_exps|_shexp|_chexps)")

ROUTER = "ffn_gate_inp"  # its result chooses the experts of a token

SINGLE_ROLES = frozenset({"attn_qkv", "attn_q", "attn_k", "attn_v", "attn_output", "output"})
"""Mul-mats outside the FFN that may be split by rows: every graph applies them to the weight as stored."""

LOGITS_CHUNK = 64
"""Tokens whose logits are computed at a time. Few logits of a micro-batch are wanted, but llama.cpp reserves memory as
if all were."""

SUM_BYTES = 256 * KIB
"""If at least this many bytes of results then need not be copied back, the split back end weights and adds up each
side's results of a token's experts before it joins them."""


def weighed_bytes(n_used: int, n_embd: int) -> int:
    """Bytes of memory traffic per token to weight the results of n_used experts, n_embd elements each, and to add them
    up, as ggml does: one after another."""
    return (2 * n_used + 3 * (n_used - 1)) * n_embd * F32


Gate = Literal["none", "apart", "fused"]
"""An FFN's gate: none, a separate weight, or fused with up in one weight."""

Relation = Literal["", "run", "input", "sum"]
"""How a block follows the block before it. "": in another run; "run": in the same run; "input": in the same run, with
the same input; "sum": in the same run if the experts before it are added up on both sides."""


@dataclass(frozen=True, slots=True)
class SplitBlock:
    """Operators cut at the same element. Activations are in elements per token; `_each`: per element of GG."""

    operators: tuple[int, ...]  # indices into the operator list, in graph order
    extent: int  # elements along the axis of the cut, the same for all of them
    step: int  # elements; CC is a multiple of it
    bytes: int  # of all their weights
    sent: int  # input of the device, independent of its slice
    sent_each: int
    returned: int  # output of the device, independent of its slice
    returned_each: int
    hidden_each: int  # hidden values on the device
    gate: Gate = "none"
    biases_each: int = 0  # elements of biases sent, independent of the number of tokens
    summed: int = 1  # experts of a token whose results may be added up before they are copied back
    biases: int = 0  # elements of biases of one expert; if not 0, the block may have hot experts but no slices
    chunk: int | None = None  # most tokens that are computed at a time; None: a whole micro-batch
    relation: Relation = ""
    after: int = 0  # bytes of memory traffic per token that follow the join of experts' results (experts_bytes)

    @property
    def begins_segment(self) -> bool:
        """Whether it reads a joined result of an earlier block of its run, so that a new segment begins."""
        return bool(self.relation and self.sent_each)

    def weight_bytes(self, gg: int) -> int:
        """Bytes of the device's slice of gg elements."""
        return self.bytes * gg // self.extent

    def n_summed(self, n_batch: int) -> int:
        """Number of a token's experts whose results each side adds up before the join, in a batch of n_batch tokens; 1:
        they are joined one by one."""
        saved = (self.returned - self.returned // self.summed) * n_batch * F32
        return self.summed if saved >= SUM_BYTES else 1

    def weighed_bytes(self, n_batch: int) -> tuple[int, int]:
        """(bytes of memory traffic per token for the host, for the device, each time) to weight results of experts and
        add them up before the join; 0 if they are joined one by one. The host does it in one pass."""
        if self.n_summed(n_batch) == 1:
            return 0, 0
        n_embd = self.returned // self.summed
        return (self.summed + 1) * n_embd * F32, weighed_bytes(self.summed, n_embd)

    def upload_bytes(self, gg: int, n_tokens: int, n_batch: int | None = None) -> int:
        """Bytes sent for n_tokens tokens of a batch of n_batch (None: n_tokens), with the routing weights if experts'
        results are added up."""
        n_summed = self.n_summed(n_batch or n_tokens)
        return (self.sent + (n_summed if n_summed > 1 else 0) + self.sent_each * gg) * n_tokens * F32

    def download_bytes(self, gg: int, n_tokens: int, n_batch: int | None = None) -> int:
        """Bytes copied back for n_tokens tokens of a batch of n_batch (None: n_tokens)."""
        n_summed = self.n_summed(n_batch or n_tokens)
        return (self.returned // n_summed + self.returned_each * gg) * n_tokens * F32

    def with_rows(self, n_rows: int, n_used: int) -> SplitBlock:
        """The same block if only n_rows of a token's n_used experts are computed."""
        return replace(
            self,
            sent=self.sent - n_used + n_rows,
            returned=self.returned * n_rows // n_used,
            returned_each=self.returned_each * n_rows // n_used,
            hidden_each=self.hidden_each * n_rows // n_used,
            summed=min(self.summed, n_rows),
        )


def can_split(operator: Operator) -> bool:
    """Whether the split back end can compute this operator: of an FFN or of SINGLE_ROLES, and long enough to be cut.

    Not tied embeddings, which a look-up also reads; nor stacks of matrices that are no experts (MLA), read as views.
    """
    has_role = _FFN_ROLE.fullmatch(operator.role) or operator.role in SINGLE_ROLES
    stacked = operator.op == "MUL_MAT" and operator.shape[2] > 1
    return bool(has_role) and not stacked and cut_extent(operator) > cut_granularity(operator)


def takes_n_g(operator: Operator) -> bool:
    """Whether the device may compute its CC for some tokens of a prompt: not the output, which computes few tokens."""
    return operator.layer is not None and can_split(operator)


def chunk_of(operator: Operator) -> int | None:
    """Most tokens that the split back end computes at a time; None: a whole micro-batch. Only the output has chunks,
    unless it has a bias."""
    return LOGITS_CHUNK if operator.role == "output" and not operator.biased else None


def experts_bytes(operator: Operator) -> int:
    """Bytes of memory traffic per token of what llama.cpp computes with results of experts: their biases are added, and
    those of the last mul-mat are weighted and added up. 0 of an operator without experts."""
    if not operator.routed:
        return 0
    n_used, n_results = operator.n_expert_used, operator.shape[1]
    biases = 2 * n_used * n_results * F32 if operator.biased else 0
    return biases + (weighed_bytes(n_used, n_results) if _reads_hidden(operator) else 0)


def is_ffn(operator: Operator) -> bool:
    """Whether it belongs to a feed-forward network, except its router."""
    return _FFN_ROLE.fullmatch(operator.role) is not None


def residents(
    operators: Sequence[Operator],
    on_device: Sequence[bool],
    first_device_layer: int,
    takes_residents: bool = True,
    is_later_device: bool = False,
    hot: Collection[int] = (),
) -> tuple[bool, ...]:
    """For each operator, whether its block lives on the device if it is split: inputs and results are in the device's
    memory, as norms and KV of its layer are there, and so is the router of its experts. The output never does, since
    logits are read on the host.

    on_device, first_device_layer: as in graph.device_copies. takes_residents: whether the device supports it at all
    (Profile.takes_residents).
    is_later_device: whether the device is a later one of several. Then an input may come from another device that still
    computes: for attention of its first layer (OLMo 2 has no norm before it), and for experts with biases between their
    mul-mats, as llama.cpp adds those of large batches on the first device. hot: operators whose experts are hot or on
    the host, each whole.
    """
    if not takes_residents:
        return (False,) * len(operators)
    routed_on_host = {
        o.layer for o, on_gpu in zip(operators, on_device, strict=True) if o.role == ROUTER and not on_gpu
    }

    def given_elsewhere(index: int, operator: Operator) -> bool:
        begins = operator.layer == first_device_layer and operator.role.startswith("attn_")
        return begins or (runs_alone(operator) and index not in hot)

    return tuple(
        can_split(o)
        and o.layer is not None
        and o.layer >= first_device_layer
        and not (o.routed and o.layer in routed_on_host)
        and not (is_later_device and given_elsewhere(i, o))
        for i, o in enumerate(operators)
    )


def has_host_input(operator: Operator, first_device_layer: int) -> bool:
    """Whether an operator that `residents` names reads what the layer before, or the embedding, left on the host: the
    device begins with it, as no norm of the layer's is before it."""
    return operator.unnormed and operator.layer == first_device_layer


def split_blocks(operators: Sequence[Operator], gg: Sequence[int]) -> tuple[SplitBlock, ...]:
    """The blocks that split operators form, in graph order of their first one.

    gg: elements of each operator's GG, 0 where it is not split. Mul-mats of one FFN whose gg are equal are one block.
    """
    families: dict[tuple[object, ...], list[int]] = {}
    for index, (operator, elements) in enumerate(zip(operators, gg, strict=True)):
        if elements:
            families.setdefault(ffn_of(index, operator), []).append(index)
    blocks = (family_blocks(operators, members, [gg[i] for i in members]) for members in families.values())
    return in_runs(operators, chain.from_iterable(blocks))


def family_blocks(operators: Sequence[Operator], members: Sequence[int], cuts: Sequence[Hashable]) -> list[SplitBlock]:
    """Blocks that mul-mats of one FFN, or a single mul-mat, form. cuts: of each member; equal if cut at the same
    element."""
    family = [operators[i] for i in members]
    together = len(set(cuts)) == 1
    if is_biased_ffn(family) or (together and _are_one_ffn(family) and not _lacks_gate(operators, members)):
        return [ffn_block(operators, members)]
    hidden = [i for i in members if not _reads_hidden(operators[i])]
    if len(set(cuts[: len(hidden)])) == 1 and _are_hidden([operators[i] for i in hidden]):
        return [_hidden_block(operators, hidden), *(_single_block(operators, i) for i in members[len(hidden) :])]
    return [_single_block(operators, i) for i in members]


def in_runs(operators: Sequence[Operator], blocks: Iterable[SplitBlock]) -> tuple[SplitBlock, ...]:
    """The blocks in graph order, with `relation` set for those in one run with the block before.

    llama.cpp computes nothing between two of Q, K and V if neither a norm nor RoPE follows the first (none follows V),
    nor between attention's output and an FFN that reads the layer's input. In an FFN whose mul-mats are cut at
    different elements, the split back end applies the GLU if it computes both of its inputs.
    """
    ordered: list[SplitBlock] = []
    for block in sorted(blocks, key=lambda block: block.operators):
        relation = _relation(operators, ordered[-1], block) if ordered else ""
        ordered.append(replace(block, relation=relation) if relation else block)
    return tuple(ordered)


def is_biased_ffn(members: Sequence[Operator]) -> bool:
    """Whether these are all the mul-mats of one FFN of experts with biases: sliced, each is a block; with hot experts
    they are one block."""
    return _are_whole_ffn(members) and all(runs_alone(operator) for operator in members)


def ffn_block(operators: Sequence[Operator], members: Sequence[int]) -> SplitBlock:
    """The block of all mul-mats of one FFN. With biases it has no cuts."""
    *first, down = sorted((operators[i] for i in members), key=_reads_hidden)
    hidden, n_embd, _ = down.shape
    used, biased = down.n_expert_used, runs_alone(down)
    return SplitBlock(
        operators=tuple(members),
        extent=hidden if biased else cut_extent(down),
        step=hidden if biased else max(cut_step(operators[i]) for i in members),
        bytes=sum(operators[i].bytes for i in members),
        sent=first[0].shape[0] + down.mul_mat.n_routed,
        sent_each=0,
        returned=n_embd * used,
        returned_each=0,
        hidden_each=used,
        gate=_gate_of(first),
        biases_each=sum(map(_sent_bias, first)),
        summed=used,
        biases=sum(operators[i].shape[1] for i in members) if biased else 0,
        after=experts_bytes(down),
    )


def _hidden_block(operators: Sequence[Operator], members: Sequence[int]) -> SplitBlock:
    """The block of gate and up (separate or fused) of an FFN whose down is not in it; it includes the GLU."""
    family = [operators[i] for i in members]
    used = family[0].n_expert_used
    return SplitBlock(
        operators=tuple(members),
        extent=cut_extent(family[0]),
        step=max(map(cut_step, family)),
        bytes=sum(operator.bytes for operator in family),
        sent=family[0].shape[0] + family[0].mul_mat.n_routed,
        sent_each=0,
        returned=0,
        returned_each=used,
        hidden_each=used,
        gate=_gate_of(family),
        biases_each=sum(map(_sent_bias, family)),
    )


def slice_weights(operators: Sequence[Operator], gg: Sequence[int]) -> int:
    """Total bytes of all slices on the device. gg: as in split_blocks."""
    blocks = split_blocks(operators, gg) if any(gg) else ()
    return sum(block.weight_bytes(gg[block.operators[0]]) for block in blocks)


def ffn_of(index: int, operator: Operator) -> tuple[object, ...]:
    match = _FFN_ROLE.fullmatch(operator.role)
    if not match or runs_alone(operator):
        return (index,)
    return (operator.layer, match[1], match[3])


def _are_one_ffn(members: Sequence[Operator]) -> bool:
    """Whether these are all the mul-mats of one FFN, of one extent."""
    return _are_whole_ffn(members) and len({cut_extent(o) for o in members}) == 1


def _lacks_gate(operators: Sequence[Operator], members: Sequence[int]) -> bool:
    """Whether these are up and down of an FFN without its gate, so that llama.cpp computes the GLU."""
    key = ffn_of(members[0], operators[members[0]])
    indices = range(max(0, members[0] - 1), members[-1])
    return any(i not in members and ffn_of(i, operators[i]) == key for i in indices)


def _are_hidden(members: Sequence[Operator]) -> bool:
    """Whether these are all mul-mats that the GLU of one FFN reads."""
    kinds = sorted(match[2] for o in members if (match := _FFN_ROLE.fullmatch(o.role)))
    gate_and_up = kinds == ["gate", "up"] and len({cut_extent(o) for o in members}) == 1
    return (gate_and_up or (len(members) == 1 and members[0].gate_up)) and not any(map(runs_alone, members))


def _relation(operators: Sequence[Operator], previous: SplitBlock, block: SplitBlock) -> Relation:
    """How a block follows the block before it: see in_runs."""
    last, first = previous.operators[-1], block.operators[0]
    if operators[last].layer != operators[first].layer or first != last + 1:
        return ""
    if operators[first].adjoins:
        return "input" if operators[first].role in ("attn_q", "attn_k", "attn_v") else "run"
    if ffn_of(last, operators[last]) == ffn_of(first, operators[first]):
        if not _reads_hidden(operators[first]):
            return "input"
        computes_glu = previous.relation or previous.hidden_each or not _lacks_gate(operators, (last, first))
        return "run" if computes_glu else ""
    return "sum" if previous.summed > 1 and previous.returned and is_ffn(operators[first]) else ""


def _are_whole_ffn(members: Sequence[Operator]) -> bool:
    """Whether these are up or gate and up (or both in one), and down."""
    kinds = sorted(match[2] for o in members if (match := _FFN_ROLE.fullmatch(o.role)))
    return kinds in (["down", "gate", "up"], ["down", "up"], ["down", "gate_up"])


def _single_block(operators: Sequence[Operator], index: int) -> SplitBlock:
    operator = operators[index]
    k, n, _ = operator.shape
    inputs = operator.n_expert_used if _reads_hidden(operator) else 1
    through_k = cut_axis(operator) == "cols"
    return SplitBlock(
        operators=(index,),
        extent=cut_extent(operator),
        step=cut_step(operator),
        bytes=operator.bytes,
        sent=(0 if through_k else k * inputs) + operator.mul_mat.n_routed,
        sent_each=inputs if through_k else 0,
        returned=n * operator.n_expert_used if through_k else 0,
        returned_each=0 if through_k else n // cut_extent(operator) * operator.n_expert_used,
        hidden_each=0,
        biases_each=0 if through_k else int(_sent_bias(operator)),
        summed=operator.n_expert_used if through_k else 1,
        chunk=chunk_of(operator),
        after=experts_bytes(operator),
    )


def _reads_hidden(operator: Operator) -> bool:
    """Whether it reads the hidden values, so that each expert has its own input."""
    match = _FFN_ROLE.fullmatch(operator.role)
    return match is not None and match[2] == "down"


def _gate_of(members: Sequence[Operator]) -> Gate:
    """The gate among the mul-mats that compute an FFN's hidden values."""
    return "fused" if members[0].gate_up else "apart" if len(members) > 1 else "none"


def _sent_bias(operator: Operator) -> bool:
    """Whether the split back end adds its bias; llama.cpp adds biases of experts."""
    return operator.biased and not runs_alone(operator)
