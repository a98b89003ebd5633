"""A plan as its JSON object and back.

History of the format (`"version"`):
  1  first; `layout` and `hot_experts` of an operator and `n_ubatch` of the workload are left out where they are
     the default, so is `streaming` (n_slots, prefetch, kept_twice, piece_bytes, link_bytes_per_s, ring_bytes) and
     `attention` (flash_attn, type_k, type_v) of a plan that says nothing of it, `notes` (sentences of the planner)
     where there are none, `bound` where it is not known, and `residents` where the device takes them. Plans of before
     may have `alone` in an operator.
Keys this version does not know are kept in `extra` and written back, so a newer minor addition survives a round trip.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any

from oallama.core.codec import CodecError, Count, Line, Mark, from_json, to_json
from oallama.core.errors import PlanError
from oallama.core.types import (
    Attention,
    MemoryLedger,
    OperatorPlacement,
    PlanRecord,
    Predicted,
    StreamSettings,
    Workload,
)

VERSION = 1

_UNPREDICTED = dict.fromkeys(field.name for field in fields(Predicted))
"""What is written of a plan that was made without a profile."""


@dataclass(frozen=True, slots=True)
class PlannedModel:
    path: str
    fingerprint: Line


@dataclass(frozen=True, slots=True)
class PlannedMachine:
    fingerprint: Line


@dataclass(frozen=True, slots=True)
class DeviceTokens:
    """n_g of a batch of n_tokens."""

    n_tokens: Count
    n_g: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDocument:
    """The keys of a plan, in the order in which they are written."""

    version: int
    model: PlannedModel
    machine: PlannedMachine
    device: Line
    policy: Line
    workload: Workload
    operators: tuple[OperatorPlacement, ...]
    token_assignment: tuple[DeviceTokens, ...]
    streaming: Annotated[StreamSettings | None, Mark.OMIT_DEFAULT, Mark.NOT_NULL] = None
    attention: Annotated[Attention | None, Mark.OMIT_DEFAULT] = None
    notes: Annotated[tuple[str, ...], Mark.OMIT_DEFAULT] = ()
    n_gpu_layers: Annotated[int, Mark.BITS_32]
    memory: MemoryLedger
    predicted: Annotated[Predicted | None, Mark.REQUIRED]
    bound: Annotated[Predicted | None, Mark.OMIT_DEFAULT] = None
    residents: Annotated[bool, Mark.OMIT_DEFAULT] = True


_KEYS = {field.name for field in fields(PlanDocument)}
_SAME = _KEYS & {field.name for field in fields(PlanRecord)} - {"token_assignment"}
"""Keys that are fields of the record as they are."""

_IGNORED = {"alone": "it is an older plan: that some operators are joined by themselves (`alone`) is ignored"}
"""Key of an operator that older plans have -> the note that says that it is ignored."""

_REMEDY = "make it again with `oallama plan`"


def plan_to_json(record: PlanRecord) -> dict[str, Any]:
    document = PlanDocument(
        model=PlannedModel(record.model_path, record.model_fingerprint),
        machine=PlannedMachine(record.machine_fingerprint),
        token_assignment=tuple(DeviceTokens(*pair) for pair in record.token_assignment),
        **{key: getattr(record, key) for key in _SAME},
    )
    return {**record.extra, **to_json(document), **({} if record.predicted else {"predicted": _UNPREDICTED})}


def plan_from_json(document: Any, source: str) -> PlanRecord:
    """The plan of a JSON object; `source` names it in errors. Raises PlanError for what is missing, of a wrong type or
    of another version."""
    version = document.get("version") if isinstance(document, dict) else None
    if type(version) is not int:
        raise PlanError(f"{source} is not a plan: an object with a whole number as its version is needed; {_REMEDY}")
    if version != VERSION:
        raise PlanError(
            f"{source} has plan version {version}, but this oallama reads version {VERSION}; "
            "make it again with `oallama plan` or use the oallama that wrote it"
        )
    if document.get("predicted") == _UNPREDICTED:
        document = {**document, "predicted": None}
    try:
        plan = from_json(PlanDocument, document, "plan")
    except CodecError as error:
        raise PlanError(f"{source}: {error}; {_REMEDY}") from None
    gone = [note for key, note in _IGNORED.items() if any(row.get(key) for row in document["operators"])]
    return PlanRecord(
        model_path=plan.model.path,
        model_fingerprint=plan.model.fingerprint,
        machine_fingerprint=plan.machine.fingerprint,
        token_assignment=tuple((row.n_tokens, row.n_g) for row in plan.token_assignment),
        notes=tuple(dict.fromkeys((*plan.notes, *gone))),
        extra={key: value for key, value in document.items() if key not in _KEYS},
        **{key: getattr(plan, key) for key in _SAME - {"notes"}},
    )
