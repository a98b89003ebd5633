"""Batches of token ids: documents laid end to end in rows, each seeing only itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .documents import Document, sample_document
from .tokenizer import BEGIN, END_OF_TEXT, Tokenizer

DOCUMENTS_PER_STEP = 10_000  # numbers reserved for a step, so that a batch depends on (seed, step) only


@dataclass(frozen=True)
class Batch:
    """ids, targets [row, time]; target -1 does not count; mask [row, 1, time, time], true: may look."""

    ids: Tensor
    targets: Tensor
    mask: Tensor


def tokens_of(document: Document, tokenizer: Tokenizer) -> list[int]:
    """Begin mark, text, end mark."""
    return [tokenizer.id_of(BEGIN), *tokenizer.encode(document.text), tokenizer.id_of(END_OF_TEXT)]


def training_batch(tokenizer: Tokenizer, seed: int, step: int, rows: int, time: int) -> Batch:
    """The batch of a step. The row's end may cut a document: what stands before the cut has the right probabilities."""
    ids = torch.zeros(rows, time, dtype=torch.long)
    targets = torch.full((rows, time), -1, dtype=torch.long)
    owner = torch.zeros(rows, time, dtype=torch.long)
    number = step * DOCUMENTS_PER_STEP
    for row in range(rows):
        at = 0
        while at < time:
            tokens = torch.tensor(tokens_of(sample_document(seed, number), tokenizer))
            n = min(len(tokens) - 1, time - at)
            ids[row, at : at + n] = tokens[:n]
            targets[row, at : at + n] = tokens[1 : n + 1]
            owner[row, at : at + n] = number
            at, number = at + n, number + 1
    return Batch(ids, targets, document_mask(owner))


def document_mask(owner: Tensor) -> Tensor:
    """owner [row, time]: number of the document at each place."""
    time = owner.shape[1]
    return ((owner[:, :, None] == owner[:, None, :]) & torch.ones(time, time, dtype=torch.bool).tril())[:, None]


def padded_batch(rows: list[list[int]]) -> Batch:
    """One document a row, padded at the end."""
    time = max(len(row) for row in rows) - 1
    ids = torch.zeros(len(rows), time, dtype=torch.long)
    targets = torch.full((len(rows), time), -1, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row) - 1] = torch.tensor(row[:-1])
        targets[i, : len(row) - 1] = torch.tensor(row[1:])
    return Batch(ids, targets, torch.ones(time, time, dtype=torch.bool).tril().expand(len(rows), 1, time, time))
