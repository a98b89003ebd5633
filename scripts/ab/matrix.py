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
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from experiments.models import Shape
from experiments.toml_file import TomlError, read_toml

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

_MODEL_KEYS = {"name", "path", "like", "type", "layers", "extra_arms", "without_arms"}  # and OPTIONS
_CAP_KEYS = {"gpu_weights", "vram", "without_arms"}
_WORKLOAD_KEYS = {"pg", "depth"}
_DEVICE_KEYS = {"name", "without_arms"}  # and OPTIONS


class MatrixError(Exception):
    """The TOML is no matrix: one sentence."""


@dataclass(frozen=True)
class Model:
    """A model file, or the shape of one that is made when it is missing."""

    name: str
    file: str | Shape  # a path in the checkout, or absolute


@dataclass(frozen=True)
class Cell:
    """One `oallama bench`: arguments are all but the model and the output, profile those of the `oallama profile` that
    it needs, none without a device."""

    id: str
    device: str  # as shown
    model: Model
    cap: str  # as shown: `25%`, `12GiB`, `free`
    workload: str  # `pp64+tg32`, `pp64+tg32 @ d4096`
    arguments: tuple[str, ...]
    profile: tuple[str, ...] = ()


@dataclass(frozen=True)
class Matrix:
    name: str
    about: str
    cells: tuple[Cell, ...]


def read_matrix(path: Path, device: str | None = None) -> Matrix:
    """device: takes the place of the file's own, and joins its name. Raises MatrixError."""
    try:
        document = read_toml(path)
    except TomlError as error:
        raise MatrixError(str(error)) from None
    try:
        return matrix(document if device is None else _on_device(document, device))
    except MatrixError as error:
        raise MatrixError(f"{path}: {error}") from None


def _on_device(document: Mapping[str, Any], device: str) -> Mapping[str, Any]:
    found = {key: value for key, value in document.items() if key != "devices"}
    word = re.sub(r"[^A-Za-z0-9._-]+", "-", device).strip("-")
    name = f"{document.get('name')}-{word}"
    return {**found, "name": name, "options": {**document.get("options", {}), "device": device}}


def matrix(document: Mapping[str, Any]) -> Matrix:
    """Cells in the order devices, models, caps, workloads. Raises MatrixError naming the key that is wrong."""
    _only(document, {"name", "about", "options", "devices", "models", "caps", "workloads"}, "the file")
    name = document.get("name")
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9._-]+", name):
        raise MatrixError("name must be a word of letters, digits, dots, dashes and underscores")
    devices = _devices(document)
    models = [_model(row) for row in _rows(document, "models")]
    caps = [_cap(row) for row in document.get("caps") or [{}]]
    workloads = [_workload(row) for row in _rows(document, "workloads")]
    for what, names in (("devices", [one.name for one in devices]), ("models", [one.model.name for one in models])):
        if len(set(names)) < len(names):
            raise MatrixError(f"two {what} have the same name")
    cells = [
        cell
        for device in devices
        for model in models
        for cap in caps
        for workload in workloads
        for cell in _cells(device, model, cap, workload)
    ]
    return Matrix(name, str(document.get("about", "")), tuple(cells))


@dataclass(frozen=True)
class _Device:
    name: str  # "" where the file has no [[devices]]
    options: Mapping[str, Any]
    without_arms: frozenset[str]


@dataclass(frozen=True)
class _Model:
    model: Model
    options: Mapping[str, Any]  # before the device's
    extra_arms: tuple[str, ...]
    without_arms: frozenset[str]


@dataclass(frozen=True)
class _Cap:
    label: str
    arguments: tuple[str, ...]
    without_arms: frozenset[str]


def _cells(device: _Device, of: _Model, cap: _Cap, workload: tuple[str, list[str]]) -> list[Cell]:
    """One for each `oallama bench`, more than one where not all arms are compared at once."""
    options = {**device.options, **of.options}
    without = device.without_arms | of.without_arms | cap.without_arms
    arms = [arm for arm in (*options["arms"], *of.extra_arms) if arm not in without]
    label, arguments = workload
    name = _slug(*([device.name] if device.name else []), of.model.name, cap.label, label)
    groups = _groups(arms, options.get("at_once", len(arms)))
    return [
        Cell(
            id=name if len(groups) == 1 else f"{name}-{number}",
            device=device.name or str(options.get("device", "")),
            model=of.model,
            cap=cap.label,
            workload=label,
            arguments=("--arms", ",".join(group), *_arguments(options), *cap.arguments, *arguments),
            profile=_profile_arguments(options),
        )
        for number, group in enumerate(groups, start=1)
    ]


def _groups(arms: Sequence[str], at_once: int) -> list[list[str]]:
    """The first arm with some of the others, as many in each group but for one."""
    first, others = arms[:1], arms[1:]
    n_groups = max(1, -(-len(others) // max(1, at_once - 1)))
    size, larger = divmod(len(others), n_groups)
    starts = [i * size + min(i, larger) for i in range(n_groups + 1)]
    return [[*first, *others[start:end]] for start, end in pairwise(starts)]


def _devices(document: Mapping[str, Any]) -> list[_Device]:
    shared = document.get("options", {})
    if not isinstance(shared, dict):
        raise MatrixError("options must be a table")
    _only(shared, set(OPTIONS), "options")
    found = []
    for row in _rows(document, "devices") if "devices" in document else [{}]:
        _only(row, set(OPTIONS) | _DEVICE_KEYS, "a device")
        if row and not isinstance(row.get("name"), str):
            raise MatrixError("a device needs a name")
        options = {**shared, **{key: value for key, value in row.items() if key in OPTIONS}}
        _options(options)
        found.append(_Device(row.get("name", ""), options, frozenset(row.get("without_arms", []))))
    return found


def _profile_arguments(options: Mapping[str, Any]) -> tuple[str, ...]:
    return () if options.get("device") == "none" else tuple(_flagged(options, ("device", "threads")))


def _arguments(options: Mapping[str, Any]) -> list[str]:
    found = _flagged(options, OPTIONS)
    for text in options.get("stock_args", []):
        found += ["--stock-args", str(text)]
    found += ["--refresh-gate"] if options.get("refresh_gate") else []
    return [*found, "--no-gate"] if options.get("gate") is False else found


def _flagged(options: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """The flags of these options, where they are given, and their values."""
    flags = ((OPTIONS[name][1], options[name]) for name in names if name in options)
    return [word for flag, value in flags if flag for word in (flag, str(value))]


def _options(options: Mapping[str, Any]) -> None:
    _types(options)
    if not options.get("arms"):
        raise MatrixError("options.arms must name at least one arm")


def _types(options: Mapping[str, Any]) -> None:
    for key, value in options.items():
        kind, _ = OPTIONS[key]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise MatrixError(f"options.{key} has the wrong type")
    if options.get("at_once", 2) < 2:
        raise MatrixError("options.at_once must be at least 2: the first arm, and one to compare with it")


def _model(row: Mapping[str, Any]) -> _Model:
    _only(row, _MODEL_KEYS | set(OPTIONS), "a model")
    if not isinstance(row.get("name"), str) or bool(row.get("path")) == bool(row.get("like")):
        raise MatrixError("a model needs a name, and either path or like")
    options = {key: value for key, value in row.items() if key in OPTIONS}
    _types(options)
    file = row.get("path") or Shape(row["like"], row.get("type", "Q4_0"), row.get("layers"))
    arms = (tuple(row.get("extra_arms", [])), frozenset(row.get("without_arms", [])))
    return _Model(Model(row["name"], file), options, *arms)


def _cap(row: Mapping[str, Any]) -> _Cap:
    _only(row, _CAP_KEYS, "a cap")
    flags = [("vram", "--vram"), ("gpu_weights", "--gpu-weights")]
    given = [(flag, str(row[key])) for key, flag in flags if key in row]
    label = " ".join(value for _, value in given) or "free"
    return _Cap(label, tuple(word for pair in given for word in pair), frozenset(row.get("without_arms", [])))


def _workload(row: Mapping[str, Any]) -> tuple[str, list[str]]:
    _only(row, _WORKLOAD_KEYS, "a workload")
    pair = row.get("pg")
    if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(n, int) and n > 0 for n in pair)):
        raise MatrixError("a workload needs pg = [prompt tokens, generated tokens], both above 0")
    depth = row.get("depth", 0)
    label = f"pp{pair[0]}+tg{pair[1]}" + (f" @ d{depth}" if depth else "")
    return label, ["-p", "0", "-n", "0", "-pg", f"{pair[0]},{pair[1]}", "-d", str(depth)]


def _rows(document: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    rows = document.get(key)
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise MatrixError(f"there must be at least one [[{key}]]")
    return rows


def _only(row: Mapping[str, Any], known: set[str], where: str) -> None:
    unknown = sorted(set(row) - known)
    if unknown:
        raise MatrixError(f"{where} has an unknown key {unknown[0]}; known are {', '.join(sorted(known))}")


def _slug(*parts: str) -> str:
    return "-".join(re.sub(r"[^A-Za-z0-9.]+", "_", part).strip("_") for part in parts)
