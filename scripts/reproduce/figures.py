"""Published figures, read from published/*.toml: one file a paper, each figure with its place there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from shared import InputError, record

from oallama.core.files import read_toml

FOLDER = Path(__file__).parent / "published"
ORDER = ("oato", "scheinfer", "hetegen", "twinpilots", "atsinfer", "pipeshard")
"""Papers in the order of the page; others follow by name."""


@dataclass(frozen=True)
class FigureCell:
    """One run of a paper: a model on a machine, what may lie on its card, and how many tokens."""

    machine: str  # of testbeds/, a preset of `simulate --machine`, or rtx5090
    model: str  # of scripts/model_shapes.py, or of docs/benchmarks/real-card-models.toml
    type: str = "Q4_0"
    n_prompt: int = 512
    n_gen: int = 128
    n_ctx: int | None = None  # None: what both need
    gpu_weights: float | None = None  # share of the weights that may be on the card; None: as memory allows
    vram_gib: float | None = None  # None: the card's
    threads: int | None = None  # of testbed A's CPU; None: as the preset is
    n_ubatch: int = 512
    fill: float = 0.9  # of that memory


@dataclass(frozen=True)
class FigureArm:
    """Whose plan, and what of the cell is different for it."""

    policy: str
    affinity: str = "default"
    fill: str = "continue"
    prefetch: str = "ahead"
    gpu_weights: float | None = None
    vram_gib: float | None = None
    pageable: bool = False  # weights are streamed from pageable memory
    shares_dram: bool = True  # CPU and link slow each other down
    cpu: float = 1.0  # of the machine's CPU rates
    offload: bool = True  # llama.cpp may compute a large batch's host operators on the card


@dataclass(frozen=True)
class Figure:
    """One published figure, and what is asked of the simulator for it."""

    paper: str
    id: str
    place: str  # figure, table or section
    what: str
    kind: str  # see quantities.py
    published: float | None  # None: the paper prints no number
    unit: str
    cells: tuple[FigureCell, ...] = ()
    ours: FigureArm | None = None
    baseline: FigureArm | None = None
    also: tuple[tuple[FigureCell, ...], FigureArm] | None = None  # cells of a second baseline with the same figure
    variant: FigureArm | None = None  # what is asked beside the paper's policy: see the paper's `about`
    take: str = "max"  # of several cells: max, min or mean (geometric)
    metric: str = "total"  # of a speed-up: ttft, tpot or total
    at_least: bool = False  # the paper says "not less than"
    echo: bool = False  # what we give is the published figure itself, or was computed back from it
    again: bool = False  # the figure has a row already, under another assumption: not counted
    of: Mapping[str, Any] = field(default_factory=dict)  # what else the kind takes
    assumed: str = ""
    why: str = ""  # they differ
    beside: str = ""  # what to know even where they do not
    holds: tuple[str, ...] = ()  # what these texts take for granted: see texts.py

    @property
    def key(self) -> str:
        """Of all papers' figures."""
        return f"{self.paper}/{self.id}"


@dataclass(frozen=True)
class Paper:
    """A paper, and what is published there."""

    key: str
    name: str
    citation: str
    about: str
    figures: tuple[Figure, ...]


def papers(folder: Path = FOLDER) -> tuple[Paper, ...]:
    """All of them. Raises InputError."""
    found = {path.stem: path for path in folder.glob("*.toml")}
    keys = [*(key for key in ORDER if key in found), *sorted(set(found) - set(ORDER))]
    return tuple(read_paper(found[key]) for key in keys)


def read_paper(path: Path) -> Paper:
    """Raises InputError."""
    document = read_toml(path)
    for key in ("name", "citation"):
        if not document.get(key):
            raise InputError(f"{path} lacks the paper's {key}")
    cells = {name: _cells(path, group) for name, group in document.get("cells", {}).items()}
    arms = {name: record(FigureArm, arm, f"{path}: arms.{name}") for name, arm in document.get("arms", {}).items()}
    figures = [_figure(path, each, cells, arms) for each in _rows(document.get("figure", ()))]
    ids = [figure.id for figure in figures]
    if len(set(ids)) < len(ids):
        raise InputError(f"{path} has two figures {max(ids, key=ids.count)!r}")
    for told in document.get("told", ()):
        about = {i for i, name in enumerate(ids) if any(fnmatchcase(name, pattern) for pattern in told["of"])}
        if not about:
            raise InputError(f"{path} has a note on {told['of']}, which are not its figures")
        for i in about:
            texts = {key: told[key] for key in ("assumed", "why", "beside") if key in told}
            figures[i] = replace(figures[i], **texts, holds=(*figures[i].holds, *told.get("holds", ())))
    return Paper(path.stem, document["name"], document["citation"], document.get("about", ""), tuple(figures))


def _rows(figures: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Each figure of a table by itself: `columns` names what its `rows` say, the other keys are of all of them."""
    for each in figures:
        shared = {key: value for key, value in each.items() if key not in ("columns", "rows")}
        for row in each.get("rows", [()]):
            yield {**shared, **dict(zip(each.get("columns", ()), row, strict=True))}


def _figure(
    path: Path, each: dict[str, Any], cells: Mapping[str, tuple[FigureCell, ...]], arms: Mapping[str, FigureArm]
) -> Figure:
    known = {one.name for one in fields(Figure)}
    for key in ("id", "place", "what", "kind"):
        if not each.get(key):
            raise InputError(f"{path}: figure {each.get('id', '?')!r} has no {key}")
    try:
        group = each.get("cells", ())
        named: dict[str, Any] = {arm: arms[each[arm]] for arm in ("ours", "baseline", "variant") if arm in each}
        named["cells"] = cells[group] if isinstance(group, str) else _cells(path, group)
        if "also" in each:
            named["also"] = (cells[each["also"]["cells"]], arms[each["also"]["baseline"]])
    except KeyError as error:
        raise InputError(f"{path}: figure {each['id']!r} names {error}, which the file lacks") from None
    plain = {key: value for key, value in each.items() if key in known and key not in named}
    extra = {key: value for key, value in each.items() if key not in known}
    return Figure(**{"paper": path.stem, "published": None, "unit": "×", **plain, **named, "of": extra})


def _cells(path: Path, group: Sequence[dict[str, Any]]) -> tuple[FigureCell, ...]:
    return tuple(record(FigureCell, one, f"{path}: a cell") for one in group)
