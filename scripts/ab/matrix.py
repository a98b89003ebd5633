"""The matrix that a TOML file describes, as a list of cells. Pure but for `read_matrix`.

name = "rpc-worker"                    # of the report and its folder
about = "one sentence"
[options]                              # of every cell; names of `oallama bench`, see OPTIONS
arms = ["stock-fit", "auto"]
device = "rpc-worker:1:1"
[[devices]]                            # where there are several: a name, and options of its own before those above
name = "pair"
device = "cpu-pair"
without_arms = ["stock-ncmoe"]
[[models]]
name = "1b"
path = "models/x.gguf"                 # in the checkout or absolute, or made: like = "llama3-8b", type, layers
extra_arms = ["stock-ncmoe"]           # beside options.arms
at_once = 4                            # any of the options, for this model alone
[[caps]]
gpu_weights = "25%"                    # or vram = "12GiB", or both; none at all: what is free
without_arms = ["cpu"]                 # under this cap
[[workloads]]
pg = [64, 32]                          # prompt, generated tokens; depth = 4096 besides
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from experiments.inputs import InputError, read_toml, record
from experiments.models import Shape

from oallama.core.codec import Expect, Size

Table = Mapping[str, Any]


OPTIONS: Mapping[str, tuple[type | tuple[type, ...], str]] = {
    "arms": (list, ""), "device": (str, "--device"), "threads": (int, "--threads"), "cpus": (str, "--cpus"),
    "repetitions": (int, "-r"), "vram_fill": ((int, float), "--vram-fill"), "flash_attn": (str, "-fa"),
    "type_k": (str, "-ctk"), "type_v": (str, "-ctv"), "n_batch": (int, "-b"), "n_ubatch": (int, "-ub"),
    "fill": (str, "--fill"), "affinity": (str, "--affinity"), "stock_args": (list, ""), "delay": (int, "--delay"),
    "seed": (int, "--seed"), "refresh_gate": (bool, ""), "gate": (bool, ""), "at_once": (int, ""),
}  # fmt: skip
"""Options of a cell, as TOML names them: type, and the flag that takes the value, "" where it is not that simple.

at_once: so many arms are compared in one `oallama bench`, the first of them with every other; more arms than that make
several cells, so that a large model's arms stay loaded between their turns and one that fails costs few others. gate:
false for `auto` without its gate."""

OF_OATO = ("fill", "affinity")


@dataclass(frozen=True)
class MatrixModel:
    """A model file, or the shape of one that is made when it is missing."""

    name: str
    file: str | Shape  # a path in the checkout, or absolute


@dataclass(frozen=True)
class Cell:
    """One `oallama bench`: arguments are all but the model and the output, profile those of the `oallama profile` that
    it needs, none without a device."""

    id: str
    device: str  # as shown
    model: MatrixModel
    cap: str  # as shown: `25%`, `12GiB`, `free`
    workload: str  # `pp64+tg32`, `pp64+tg32 @ d4096`
    arguments: tuple[str, ...]
    profile: tuple[str, ...] = ()


@dataclass(frozen=True)
class Matrix:
    name: str
    about: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class _File:
    """The whole document. Tables of devices and models also have OPTIONS of their own."""

    name: str
    models: tuple[dict[str, Any], ...] = ()
    workloads: tuple[dict[str, Any], ...] = ()
    about: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    devices: tuple[dict[str, Any], ...] | None = None
    caps: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class _Device:
    name: str = ""  # where the file has no [[devices]]
    without_arms: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Model:
    name: str
    path: str = ""
    like: str = ""
    type: str = "Q4_0"
    layers: int | None = None
    extra_arms: tuple[str, ...] = ()
    without_arms: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Cap:
    vram: Any = None
    gpu_weights: Any = None
    without_arms: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Workload:
    pg: Annotated[tuple[Size, Size], Expect("must be [prompt tokens, generated tokens], both above 0")]
    depth: int = 0


def read_matrix(path: Path, device: str | None = None) -> Matrix:
    """device: takes the place of the file's own, and joins its name. Raises InputError."""
    document = read_toml(path)
    try:
        return matrix(document if device is None else _on_device(document, device))
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _on_device(document: Table, device: str) -> Table:
    found = {key: value for key, value in document.items() if key != "devices"}
    word = re.sub(r"[^A-Za-z0-9._-]+", "-", device).strip("-")
    name = f"{document.get('name')}-{word}"
    return {**found, "name": name, "options": {**document.get("options", {}), "device": device}}


def matrix(document: Table) -> Matrix:
    """Cells in the order devices, models, caps, workloads. Raises InputError naming the key that is wrong."""
    file = record(_File, document, "the file")
    if not re.fullmatch(r"[A-Za-z0-9._-]+", file.name):
        raise InputError("name must be a word of letters, digits, dots, dashes and underscores")
    for what, rows in (("devices", file.devices), ("models", file.models), ("workloads", file.workloads)):
        names = [row["name"] for row in rows or () if "name" in row]
        if rows is not None and not rows:
            raise InputError(f"there must be at least one [[{what}]]")
        if len(set(names)) < len(names):
            raise InputError(f"two {what} have the same name")
    for row in file.devices or ():
        if "name" not in row:
            raise InputError("a device needs a name")
    caps = [record(_Cap, row, "a cap") for row in file.caps or ({},)]
    workloads = [record(_Workload, row, "a workload") for row in file.workloads]
    cells = [
        cell
        for device in file.devices or ({},)
        for model in file.models
        for cap in caps
        for workload in workloads
        for cell in _cells(file.options, device, model, cap, workload)
    ]
    return Matrix(file.name, file.about, tuple(cells))


def _own(row: Table) -> Table:
    """The keys of a table that are no options."""
    return {key: row[key] for key in row if key not in OPTIONS}


def _options(*tables: Table) -> Table:
    """Of several tables, later ones first. Raises InputError."""
    options = {key: row[key] for row in tables for key in row if row is tables[0] or key in OPTIONS}
    for key, value in options.items():
        if key not in OPTIONS:
            raise InputError(f"options has an unknown key {key}; known are {', '.join(sorted(OPTIONS))}")
        kind, _ = OPTIONS[key]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise InputError(f"options.{key} has the wrong type")
    if not options.get("arms"):
        raise InputError("options.arms must name at least one arm")
    if options.get("at_once", 2) < 2:
        raise InputError("options.at_once must be at least 2: the first arm, and one to compare with it")
    return options


def _flagged(options: Table, names: Iterable[str]) -> list[str]:
    """The flags of these options, where they are given, and their values."""
    flags = ((OPTIONS[name][1], options[name]) for name in names if name in options)
    return [word for flag, value in flags if flag for word in (flag, str(value))]


def _cells(shared: Table, device_row: Table, model_row: Table, cap: _Cap, workload: _Workload) -> list[Cell]:
    """One for each `oallama bench`, more than one where not all arms are compared at once."""
    device, model = record(_Device, _own(device_row), "a device"), record(_Model, _own(model_row), "a model")
    if bool(model.path) == bool(model.like):
        raise InputError("a model needs a name, and either path or like")
    options = _options(shared, device_row, model_row)
    without = {*device.without_arms, *model.without_arms, *cap.without_arms}
    groups = _groups([a for a in (*options["arms"], *model.extra_arms) if a not in without], options.get("at_once"))
    caps = [pair for pair in (("--vram", cap.vram), ("--gpu-weights", cap.gpu_weights)) if pair[1] is not None]
    cap_label = " ".join(str(value) for _, value in caps) or "free"
    n_prompt, n_gen = workload.pg
    label = f"pp{n_prompt}+tg{n_gen}" + (f" @ d{workload.depth}" if workload.depth else "")
    name = _slug(*([device.name] if device.name else []), model.name, cap_label, label)
    others = (
        *(word for text in options.get("stock_args", []) for word in ("--stock-args", str(text))),
        *(["--refresh-gate"] if options.get("refresh_gate") else []),
        *(["--no-gate"] if options.get("gate") is False else []),
        *(str(word) for pair in caps for word in pair),
        *("-p", "0", "-n", "0", "-pg", f"{n_prompt},{n_gen}", "-d", str(workload.depth)),
    )

    def arguments(group: Sequence[str]) -> tuple[str, ...]:
        names = [option for option in OPTIONS if "oato" in group or option not in OF_OATO]
        return ("--arms", ",".join(group), *_flagged(options, names), *others)

    return [
        Cell(
            id=name if len(groups) == 1 else f"{name}-{number}",
            device=device.name or str(options.get("device", "")),
            model=MatrixModel(model.name, model.path or Shape(model.like, model.type, model.layers)),
            cap=cap_label,
            workload=label,
            arguments=arguments(group),
            profile=() if options.get("device") == "none" else tuple(_flagged(options, ("device", "threads"))),
        )
        for number, group in enumerate(groups, start=1)
    ]


def _groups(arms: Sequence[str], at_once: int | None) -> list[list[str]]:
    """The first arm with some of the others, as many in each group but for one."""
    first, others = arms[:1], arms[1:]
    n_groups = max(1, -(-len(others) // max(1, (at_once or len(arms)) - 1)))
    size, larger = divmod(len(others), n_groups)
    starts = [i * size + min(i, larger) for i in range(n_groups + 1)]
    return [[*first, *others[start:end]] for start, end in pairwise(starts)]


def _slug(*parts: str) -> str:
    return "-".join(re.sub(r"[^A-Za-z0-9.]+", "_", part).strip("_") for part in parts)
