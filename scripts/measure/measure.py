"""The record of a measurement: options, steps that are measured one by one, and a table of what came of them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class MeasureStep:
    """One thing to measure. id: its name in the results; file: the model or plan; run: what returns the raw data."""

    id: str
    file: str
    run: Callable[[], Any]


@dataclass(frozen=True)
class Measure:
    """about: what is measured, in a sentence. rows: a table's rows, out of (step's id, its data) of all steps."""

    about: str
    add_options: Callable[[argparse.ArgumentParser], None]
    steps: Callable[[argparse.Namespace], Iterator[MeasureStep]]
    columns: Sequence[str]
    rows: Callable[[Sequence[tuple[str, Any]]], list[Sequence[object]]]


def add_common(
    parser: argparse.ArgumentParser, device: str = "rpc-worker:1:1", n_prompt: int = 64, n_gen: int = 32,
    rounds: int = 8,
) -> None:  # fmt: skip
    """The options that most measurements have."""
    parser.add_argument("files", nargs="+", metavar="MODEL")
    parser.add_argument("--device", type=timed_device, default=device)
    parser.add_argument("-t", "--threads", type=numbers, default=[1], metavar="N,…", help="of the CPU (default: 1)")
    parser.add_argument("-p", "--n-prompt", type=int, default=n_prompt)
    parser.add_argument("-n", "--n-gen", type=int, default=n_gen)
    parser.add_argument("-r", "--rounds", type=int, default=rounds)


def add_soak(parser: argparse.ArgumentParser, device: str, what: str, total: int, each: int) -> None:
    """The options of a soak: so many of `what` in all, and by one process."""
    parser.add_argument("files", nargs=1, metavar="MODEL")
    parser.add_argument("--device", default=device)
    parser.add_argument(f"--{what}", type=int, default=total, help=f"in all (default: {total})")
    parser.add_argument("--each", type=int, default=each, help=f"by one process (default: {each})")
    parser.add_argument("--minutes", type=float, default=30.0, help="of one process at most (default: 30)")


def soak_steps(options: argparse.Namespace, total: int, name: str, run: Callable[..., Any]) -> Iterator[MeasureStep]:
    """A step a process; run: takes the model's path, the options and a seed."""
    (path,) = options.files
    for seed in range(-(-total // options.each)):
        yield MeasureStep(f"{name} {seed + 1}", path, partial(run, path, options, seed))


def timed_device(text: str) -> str:
    """The device as it is when it is timed: an emulated one that computes real values keeps no card's time."""
    from oallama.device.spec import parse_device

    return str(parse_device(text).timed)


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def name_of(file: str) -> str:
    """Of a model or a plan, as tables show it."""
    return Path(file).name.removesuffix(".gguf")


def column(samples: Sequence[dict[str, float]], key: str) -> list[float]:
    return [sample[key] for sample in samples]
