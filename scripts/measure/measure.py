"""What a measurement is: options, steps that are measured one by one, and a table of what came of them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Step:
    """One thing to measure. id: its name in the results; file: the model or plan; run: what returns the raw data."""

    id: str
    file: str
    run: Callable[[], Any]


@dataclass(frozen=True)
class Measure:
    """about: what is measured, in a sentence. rows: a table's rows, out of (step's id, its data) of all steps."""

    about: str
    add_options: Callable[[argparse.ArgumentParser], None]
    steps: Callable[[argparse.Namespace], Iterator[Step]]
    columns: Sequence[str]
    rows: Callable[[Sequence[tuple[str, Any]]], list[Sequence[object]]]


def add_common(
    parser: argparse.ArgumentParser, files: str = "MODEL", n_prompt: int = 64, n_gen: int = 32, rounds: int = 8
) -> None:
    """The options that most measurements have."""
    parser.add_argument("files", nargs="+", metavar=files)
    parser.add_argument("--device", default="rpc-worker:1:1")
    parser.add_argument("-t", "--threads", type=numbers, default=[1], metavar="N,…", help="of the CPU (default: 1)")
    parser.add_argument("-p", "--n-prompt", type=int, default=n_prompt)
    parser.add_argument("-n", "--n-gen", type=int, default=n_gen)
    parser.add_argument("-r", "--rounds", type=int, default=rounds)


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def name_of(file: str) -> str:
    """Of a model or a plan, as tables show it."""
    return Path(file).name.removesuffix(".gguf")


def column(samples: Sequence[dict[str, float]], key: str) -> list[float]:
    return [sample[key] for sample in samples]
