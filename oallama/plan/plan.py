"""The plan: for every operator where it is stored and computed (gg + cg + cc = 1), as a record and as a file.

Readable versions of the file (`"version"`):
  1  the first. Default values are omitted: `layout` and `hot_experts` of an operator; `n_ubatch`, `n_outputs` and
     `step` of the workload (one token per decode step); `streaming` (n_slots, prefetch, kept_twice, piece_bytes,
     link_bytes_per_s, ring_bytes, exchange), `attention` (flash_attn, type_k, type_v), `notes` (sentences of the
     planner), `bound`, `residents`, `stock` (only for stock llama.cpp's own configuration) and `draft`.
  2  an operator also has its cut in elements, [cpu, streamed, device]. If its fractions differ from the cut, as in an
     edited file, the fractions count.
  3  a plan for several devices, whose names are in `device`, separated by commas: an operator has the number of its
     layer's device (omitted if 0), and `memory` has each device's memory in `devices`. All other plans are written as
     version 2.
Unknown keys are kept in `extra` and written back, so that a newer minor addition survives a round trip.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar

from oallama.core.codec import CodecError, Count, Line, Mark, from_json, parse_json, to_json
from oallama.core.errors import PlanError
from oallama.core.files import unwritten, write_whole
from oallama.core.options import CACHE_TYPES
from oallama.core.types import (
    Attention,
    Backend,
    DecodeStep,
    Draft,
    MemoryBreakdown,
    ModelInfo,
    Operator,
    OperatorPlacement,
    Predicted,
    SplitSettings,
    StockOptions,
    StreamSettings,
    Workload,
)
from oallama.core.units import format_bytes, format_seconds
from oallama.device.spec import device_texts
from oallama.plan.split import FRACTION_TOLERANCE, check_hot_experts, slice_counts

VERSION = 3
READABLE_VERSIONS = (1, 2, 3)
MAX_FILE_BYTES = 64 * 1024 * 1024
MAX_SLOTS = 64  # of the ring that the split back end takes

_UNPREDICTED = dict.fromkeys(field.name for field in fields(Predicted))
"""Written for a plan made without a profile."""

_REMEDY = "make it again with `oallama plan`"


@dataclass(frozen=True, slots=True, repr=False)
class Plan:
    """Where each operator of a model is stored and computed. Placer.plan makes one, and it can be saved, read and
    edited as a file.

    gg, cg and cc of an operator are in 0..1 and sum to 1, and no operator is placed twice."""

    JSON_KEYS: ClassVar[tuple[str, ...]] = (
        "version", "model", "machine", "device", "policy", "workload", "operators", "token_assignment", "streaming",
        "attention", "notes", "n_gpu_layers", "memory", "predicted", "bound", "residents", "behind_first", "stock",
        "draft",
    )  # fmt: skip

    model_path: str
    model_fingerprint: Line
    machine_fingerprint: Line
    device: Line  # a ggml device name or the --device spec that makes it; "none"
    policy: Line
    workload: Workload
    operators: tuple[OperatorPlacement, ...]
    n_gpu_layers: Annotated[int, Mark.BITS_32]
    memory: MemoryBreakdown
    predicted: Annotated[Predicted | None, Mark.REQUIRED]  # None: made without a profile
    token_assignment: tuple[tuple[Count, Count], ...] = ()  # (n_tokens, n_g)
    # None: not given; the defaults hold
    streaming: Annotated[StreamSettings | None, Mark.OMIT_DEFAULT] = None
    # that it was made for; None: not given
    attention: Annotated[Attention | None, Mark.OMIT_DEFAULT] = None
    # of the planner: what was lowered or left out to make it fit, in sentences
    notes: Annotated[tuple[str, ...], Mark.OMIT_DEFAULT] = ()
    extra: dict[str, Any] = field(default_factory=dict)
    # lower bound of all placements in this memory; None: not known
    bound: Annotated[Predicted | None, Mark.OMIT_DEFAULT] = None
    # whether split blocks live on the device where their neighbours are there
    residents: Annotated[bool, Mark.OMIT_DEFAULT] = True
    # of several devices: the same of each behind the first
    behind_first: Annotated[tuple[SplitSettings, ...], Mark.OMIT_DEFAULT] = ()
    # of stock llama.cpp's own configuration: how it is loaded; None: as the rows say
    stock: Annotated[StockOptions | None, Mark.OMIT_DEFAULT] = None
    # how drafts are made; None: none are
    draft: Annotated[Draft | None, Mark.OMIT_DEFAULT] = None

    def __post_init__(self) -> None:
        _check(self)

    @property
    def version(self) -> int:
        return VERSION if len(device_texts(self.device)) > 1 else 2

    @property
    def split_settings(self) -> tuple[SplitSettings, ...]:
        """Settings of the split back end for each device."""
        return (SplitSettings(self.token_assignment, self.streaming, self.residents), *self.behind_first)

    @property
    def model(self) -> dict[str, str]:
        """The file's `model`."""
        return {"path": self.model_path, "fingerprint": self.model_fingerprint}

    @property
    def machine(self) -> dict[str, str]:
        """The file's `machine`."""
        return {"fingerprint": self.machine_fingerprint}

    def __repr__(self) -> str:
        times = f", {_times(self.predicted)}" if self.predicted else ""
        return f"<Plan {self.policy} for {Path(self.model_path).name} on {self.device}: {self._weights}{times}>"

    @property
    def _weights(self) -> str:
        on_device, on_host = format_bytes(self.memory.weights_gpu), format_bytes(self.memory.weights_host)
        return f"{on_device} of weights on the device, {on_host} on the host"

    def n_on(self, backend: Backend) -> int:
        """Return the number of operators of a back end: CPU, GPU or split."""
        return sum(row.backend == backend for row in self.operators)

    def summary(self) -> str:
        """Return workload, placement of the weights, predicted times and the planner's notes as lines of text."""
        workload = self.workload
        n_whole, n_split = self.n_on("GPU"), self.n_on("split")
        lines = [
            f"{Path(self.model_path).name} on {self.device}, policy {self.policy}",
            f"for {workload.n_prompt} prompt and {workload.n_gen} generated tokens in a context of {workload.n_ctx}",
            self._weights,
            f"operators: {n_whole} on the device, {n_split} split, "
            f"{len(self.operators) - n_whole - n_split} on the CPU",
            f"predicted: {_times(self.predicted)}" if self.predicted else "no prediction: planned without a profile",
            *self.notes,
        ]
        return "\n".join(lines)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the plan's JSON, which identifies the plan in results."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    @property
    def without_own_drafts(self) -> Plan:
        """The plan without the model's own drafts, for a load without its MTP layer."""
        if self.draft is None or self.draft.kind != "draft-mtp":
            return self
        memory, n_bytes = self.memory, self.draft.device_bytes
        memory = replace(memory, weights_gpu=memory.weights_gpu - n_bytes, spare=memory.spare + n_bytes)
        step = replace(self.workload.step, n_draft=0, accepted=0.0, mtp=False, shares_output=False)
        return replace(self, memory=memory, workload=replace(self.workload, step=step), draft=None)

    def pairs(self, operators: Sequence[Operator]) -> list[tuple[Operator, OperatorPlacement]]:
        """Return the operators with their rows, in the given order. Raises PlanError for another model's operators."""
        rows = rows_of(operators, self.operators)
        if unknown := sorted({row.name for row in self.operators} - {operator.name for operator in operators}):
            raise PlanError(f"the plan places {_some(unknown)}, which this model does not have; make a new plan for it")
        return list(zip(operators, rows, strict=True))

    def check(self, model: ModelInfo, operators: Sequence[Operator]) -> None:
        """Raise PlanError unless the plan is for this model: fingerprint, operator names and split granularity."""
        if self.model_fingerprint != model.fingerprint:
            raise PlanError(
                f"the plan is for {ascii(Path(self.model_path).name)[1:-1]} with fingerprint "
                f"{self.model_fingerprint[:12]}, but {Path(model.path).name} has {model.fingerprint[:12]}; "
                "make a new plan with `oallama plan`"
            )
        for operator, row in self.pairs(operators):
            slice_counts(operator, row)
            check_hot_experts(operator, row)
        self.device_layers(operators, model.n_layer)

    def device_layers(self, operators: Sequence[Operator], n_layer: int) -> tuple[int, ...]:
        """Return the number of layers of each of several devices, from the first layer on a device; the output counts
        as a layer after the last. () for a single device. operators: of the plan's model. Raises PlanError for devices
        that do not ascend with the layers, which llama.cpp requires."""
        counts = [0] * len(device_texts(self.device))
        if (last_device := max((row.device for row in self.operators), default=0)) >= len(counts):
            raise PlanError(
                f"the plan has operators on device {last_device}, counted from 0, but its device is {self.device}"
            )
        if len(counts) == 1:
            return ()
        device_of = {operator.layer_in(n_layer): row.device for operator, row in self.pairs(operators)}
        device = 0
        for layer in range(n_layer + 1 - self.n_gpu_layers, n_layer + 1):
            previous_device, device = device, device_of.get(layer, device)
            if device < previous_device:
                raise PlanError(
                    f"the plan has layer {layer} on device {device} behind layers on device {previous_device}; "
                    "devices must ascend with the layers"
                )
            counts[device] += 1
        if any(row.device != device_of[operator.layer_in(n_layer)] for operator, row in self.pairs(operators)):
            raise PlanError("the plan has one layer on two devices; plan again")
        return tuple(counts)

    def to_json(self) -> dict[str, Any]:
        document = {**self.extra, **to_json(self)}
        document["token_assignment"] = [{"n_tokens": n_tokens, "n_g": n_g} for n_tokens, n_g in self.token_assignment]
        return document if self.predicted else {**document, "predicted": _UNPREDICTED}

    @classmethod
    def from_json(cls, document: Any, source: str = "the plan") -> Plan:
        """A plan from parsed JSON; `source` names it in errors. Raises PlanError for a missing key, a wrong type or an
        unknown version."""
        version = document.get("version") if isinstance(document, dict) else None
        if type(version) is not int:
            raise PlanError(
                f"{source} is not a valid plan: it must be an object with a whole number as version; {_REMEDY}"
            )
        if version not in READABLE_VERSIONS:
            raise PlanError(
                f"{source} has plan version {version}, but this oallama reads versions 1 to {VERSION}; "
                "make it again with `oallama plan` or use the oallama that wrote it"
            )
        try:
            nested = from_json(_Nested, document, "plan")
            flattened = {
                **document,
                "model_path": nested.model["path"],
                "model_fingerprint": nested.model["fingerprint"],
                "machine_fingerprint": nested.machine["fingerprint"],
                "token_assignment": [[row["n_tokens"], row["n_g"]] for row in nested.token_assignment],
                "extra": {key: value for key, value in document.items() if key not in cls.JSON_KEYS},
                **({"predicted": None} if document.get("predicted") == _UNPREDICTED else {}),
            }
            plan = from_json(cls, flattened, "plan")
        except CodecError as error:
            raise PlanError(f"{source}: {error}; {_REMEDY}") from None
        except KeyError as error:
            raise PlanError(f"{source}: model, machine or token_assignment lacks {error}; {_REMEDY}") from None
        edited = [row.name for row in plan.operators if row.cut is not None and not _agrees(row)]
        if not edited:
            return plan
        operators = tuple(replace(row, cut=None) if row.name in edited else row for row in plan.operators)
        note = f"the cut of {_some(edited)} differs from its fractions; using the fractions"
        return replace(plan, operators=operators, notes=tuple(dict.fromkeys((*plan.notes, note))))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, atomically. Raises PlanError if the file cannot be written."""
        target = Path(path)
        if target.is_dir():
            raise PlanError(f"cannot write the plan to {target}, a folder; name a file in it")
        if not target.parent.is_dir():
            raise PlanError(f"cannot write the plan to {target}: no folder {target.parent}")
        try:
            write_whole(target, json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n")
        except OSError as error:
            raise unwritten(PlanError, f"the plan to {target}", error) from None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan file. Raises PlanError if it is missing, invalid, or of an unknown version."""
        try:
            with Path(path).open("rb") as file:
                text = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise PlanError(f"cannot read the plan {path}: {error.strerror or error}") from None
        if len(text) > MAX_FILE_BYTES:
            raise PlanError(f"{path} is larger than {MAX_FILE_BYTES // 2**20} MiB; it is not a plan")
        try:
            document = parse_json(text)
        except CodecError as error:
            raise PlanError(f"{path} is not valid JSON ({error}); write plans with `oallama plan -o`") from None
        return cls.from_json(document, source=str(path))


def _times(predicted: Predicted) -> str:
    rate = f", then {1 / predicted.tpot_s:.3g} tokens/s" if predicted.tpot_s > 0 else ""
    return f"first token after {format_seconds(predicted.ttft_s)}{rate}"


@dataclass(frozen=True, slots=True)
class _Nested:
    """The keys of the file that a Plan has flat."""

    model: dict[str, Any]
    machine: dict[str, Any]
    token_assignment: tuple[dict[str, Any], ...]


def _agrees(row: OperatorPlacement) -> bool:
    """Whether the cut agrees with the fractions."""
    cut, total = row.cut or (), sum(row.cut or ())
    fractions = (row.cc, row.cg, row.gg)
    return total > 0 and all(
        abs(n / total - fraction) <= FRACTION_TOLERANCE for n, fraction in zip(cut, fractions, strict=True)
    )


def _check(record: Plan) -> None:
    """Raises PlanError for fractions outside 0..1 or whose sum is not 1, operators placed twice, an invalid ring, an
    unknown KV cache type, or a token assignment that does not ascend."""
    if len(record.split_settings) > len(device_texts(record.device)):
        raise PlanError(
            f"the plan splits beside {len(record.split_settings)} devices, but its device is {record.device}"
        )
    for settings in record.split_settings:
        _check_tokens(settings.token_assignment)
        if settings.streaming is not None and not 1 <= settings.streaming.n_slots <= MAX_SLOTS:
            raise PlanError(f"the plan has a ring of {settings.streaming.n_slots} slots; it must have 1 to {MAX_SLOTS}")
    for key in ("type_k", "type_v") if record.attention else ():
        if (cache := getattr(record.attention, key)) not in CACHE_TYPES:
            raise PlanError(f"unknown attention.{key} {cache!r} in the plan; choose from {', '.join(CACHE_TYPES)}")
    _check_step(record.workload.step)
    if record.draft is not None and bool(record.draft.model_path) is not (record.draft.kind == "draft-simple"):
        raise PlanError("the plan's draft must name a model if its kind is draft-simple, and only then")
    if record.draft is not None and record.draft.kind == "draft-mtp" and not record.workload.step.mtp:
        raise PlanError("the plan's draft is of kind draft-mtp, but its decode step is not; plan again")
    placed_names: set[str] = set()
    for row in record.operators:
        if row.name in placed_names:
            raise PlanError(f"operator {row.name} is placed twice; keep one entry")
        placed_names.add(row.name)
        fractions = (row.gg, row.cg, row.cc)
        if not all(math.isfinite(fraction) and 0 <= fraction <= 1 for fraction in fractions):
            raise PlanError(f"operator {row.name} has a fraction outside 0..1: gg, cg, cc = {fractions}")
        if abs(math.fsum(fractions) - 1) > FRACTION_TOLERANCE:
            raise PlanError(
                f"operator {row.name}: gg + cg + cc must be 1, not {math.fsum(fractions):.9g} "
                f"(gg, cg, cc = {fractions})"
            )


def _check_step(step: DecodeStep) -> None:
    """A step accepts no more drafts than it has, and takes no negative time."""
    sound = 0 <= step.accepted <= step.n_draft and all(0 <= s < math.inf for s in (step.draft_s, step.draft_prompt_s))
    if not sound:
        raise PlanError(f"the plan's decode step is not valid: {step}")


def _check_tokens(table: Sequence[tuple[int, int]]) -> None:
    """n_tokens strictly ascending, and n_g at most n_tokens."""
    for (previous_n_tokens, _), (n_tokens, n_g) in pairwise([(0, 0), *table]):
        if n_tokens <= previous_n_tokens or not 0 <= n_g <= n_tokens:
            raise PlanError(
                f"token_assignment: n_g is {n_g} at {n_tokens} tokens; n_tokens must increase, n_g must not exceed it"
            )


def rows_of(operators: Sequence[Operator], rows: Iterable[OperatorPlacement]) -> list[OperatorPlacement]:
    """The row of each operator. Raises PlanError for operators without one."""
    by_name = {row.name: row for row in rows}
    if missing := sorted({operator.name for operator in operators} - by_name.keys()):
        raise PlanError(f"the plan does not place {_some(missing)}; make a new plan for this model")
    return [by_name[operator.name] for operator in operators]


def _some(names: list[str]) -> str:
    return f"operator {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
