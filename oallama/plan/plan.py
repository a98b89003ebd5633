"""The plan: for every operator where it is stored and computed (gg + cg + cc = 1), as a file and as a record.

History of the JSON format (`"version"`):
  1  first; `layout` of an operator and `n_ubatch` of the workload are left out where they are the default, so is
     `streaming` (n_slots, prefetch, kept_twice, piece_bytes, link_bytes_per_s) and `attention` (flash_attn, type_k,
     type_v) of a plan that says nothing of it, and `notes` (sentences of the planner) where there are none.
Keys this version does not know are kept in `extra` and written back, so a newer minor addition survives a round trip.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast, get_args

from oallama.core.codec import CodecError, parse_json
from oallama.core.errors import PlanError
from oallama.core.options import CACHE_TYPES, FLASH_ATTENTION
from oallama.core.types import (
    Attention,
    FlashAttention,
    MemoryLedger,
    ModelInfo,
    Operator,
    OperatorPlacement,
    PlanRecord,
    Predicted,
    PrefetchMode,
    StreamSettings,
    Workload,
)
from oallama.plan.read import Reader, shown
from oallama.plan.split import FRACTION_TOLERANCE, slice_counts

VERSION = 1
MAX_FILE_BYTES = 64 * 1024 * 1024
MAX_SLOTS = 64  # of the ring that the split back end takes

_LEDGER_BYTES = ("limit", "weights_gpu", "weights_host", "kv", "compute", "staging", "spare")
_PREDICTED = ("ttft_s", "tpot_s", "total_s")  # null without a profile
_KEYS = {
    *("version", "model", "machine", "device", "policy", "workload", "operators"),
    *("token_assignment", "streaming", "attention", "notes", "n_gpu_layers", "memory", "predicted"),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked PlanRecord: its fractions are in 0..1 and sum to 1, its operator names are distinct."""

    record: PlanRecord

    def __post_init__(self) -> None:
        _check_record(self.record)

    @property
    def operators(self) -> tuple[OperatorPlacement, ...]:
        return self.record.operators

    @property
    def device(self) -> str:
        return self.record.device

    @property
    def policy(self) -> str:
        return self.record.policy

    @property
    def workload(self) -> Workload:
        return self.record.workload

    @property
    def n_gpu_layers(self) -> int:
        return self.record.n_gpu_layers

    @property
    def memory(self) -> MemoryLedger:
        return self.record.memory

    @property
    def predicted(self) -> Predicted | None:
        return self.record.predicted

    @property
    def fingerprint(self) -> str:
        """sha256 of the plan's JSON, so a result can say which plan made it."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    def check(self, model: ModelInfo, operators: Sequence[Operator]) -> None:
        """Refuse a plan made for another model: raises PlanError unless fingerprint, operator names and split
        granularity agree."""
        if self.record.model_fingerprint != model.fingerprint:
            raise PlanError(
                f"the plan was made for {ascii(Path(self.record.model_path).name)[1:-1]} with fingerprint "
                f"{self.record.model_fingerprint[:12]}, but {Path(model.path).name} has {model.fingerprint[:12]}; "
                "make a new plan with `oallama plan`"
            )
        planned = {placement.name: placement for placement in self.operators}
        _same_names(planned.keys(), [operator.name for operator in operators])
        for operator in operators:
            slice_counts(operator, planned[operator.name])

    def to_json(self) -> dict[str, Any]:
        """The plan as its JSON object."""
        record = self.record
        return {
            **record.extra,
            "version": VERSION,
            "model": {"path": record.model_path, "fingerprint": record.model_fingerprint},
            "machine": {"fingerprint": record.machine_fingerprint},
            "device": record.device,
            "policy": record.policy,
            "workload": asdict(record.workload),
            "operators": [_placement_to_json(placement) for placement in record.operators],
            "token_assignment": [{"n_tokens": n, "n_g": n_g} for n, n_g in record.token_assignment],
            **({"streaming": asdict(record.streaming)} if record.streaming else {}),
            **({"attention": asdict(record.attention)} if record.attention else {}),
            **({"notes": list(record.notes)} if record.notes else {}),
            "n_gpu_layers": record.n_gpu_layers,
            "memory": asdict(record.memory),
            "predicted": asdict(record.predicted) if record.predicted else dict.fromkeys(_PREDICTED),
        }

    @classmethod
    def from_json(cls, document: Any, source: str = "the plan") -> Plan:
        """A plan out of parsed JSON; `source` names it in errors. Raises PlanError on anything that is not a plan."""
        reader = Reader(document, source)
        version = reader.whole("version")
        if version != VERSION:
            raise PlanError(
                f"{source} has plan version {version}, but this oallama reads version {VERSION}; "
                "make it again with `oallama plan` or use the oallama that wrote it"
            )
        workload, memory, predicted = reader.section("workload"), reader.section("memory"), reader.section("predicted")
        return cls(
            PlanRecord(
                model_path=reader.section("model").path("path"),
                model_fingerprint=reader.section("model").text("fingerprint"),
                machine_fingerprint=reader.section("machine").text("fingerprint"),
                device=reader.text("device"),
                policy=reader.text("policy"),
                workload=Workload(
                    n_prompt=workload.whole("n_prompt", least=0, bits=32),
                    n_gen=workload.whole("n_gen", least=0, bits=32),
                    n_ctx=workload.whole("n_ctx", least=0, bits=32),
                    n_ubatch=workload.whole("n_ubatch", least=1, default=512, bits=32),
                ),
                operators=tuple(_placement_from_json(row) for row in reader.rows("operators")),
                token_assignment=tuple(
                    (row.whole("n_tokens", least=0), row.whole("n_g", least=0))
                    for row in reader.rows("token_assignment")
                ),
                streaming=_streaming_from_json(reader.section("streaming")) if "streaming" in reader.document else None,
                attention=_attention_from_json(reader.document.get("attention")),
                notes=reader.texts("notes") if "notes" in reader.document else (),
                n_gpu_layers=reader.whole("n_gpu_layers", bits=32),
                memory=MemoryLedger(
                    capacity=memory.whole("capacity"),
                    fill=memory.number("fill"),
                    **{key: memory.whole(key) for key in _LEDGER_BYTES},
                ),
                predicted=None
                if all(predicted.is_null(key) for key in _PREDICTED)
                else Predicted(*(predicted.number(key) for key in _PREDICTED)),
                extra={key: value for key, value in reader.document.items() if key not in _KEYS},
            )
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan, whole or not at all. Raises PlanError where the file cannot be written."""
        target = Path(path)
        if target.is_dir():
            raise PlanError(f"cannot write the plan to {target}: it is a folder; name a file in it")
        temporary = target.with_name(f".{target.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}")
        try:
            try:
                with temporary.open("x", encoding="utf-8") as file:
                    json.dump(self.to_json(), file, indent=1, allow_nan=False)
                    file.write("\n")
                temporary.replace(target)
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as error:
            raise PlanError(f"cannot write the plan to {target}: {error.strerror or error}") from None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan file. Raises PlanError where it is missing, no JSON, or no plan of a version known here."""
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
            raise PlanError(f"{path} is not JSON ({error}); write plans with `oallama plan -o`") from None
        return cls.from_json(document, source=str(path))


def _check_record(record: PlanRecord) -> None:
    """Raises PlanError for fractions outside 0..1 or of another sum than 1, operators placed twice, a ring that cannot
    be, or a token assignment that does not ascend."""
    _check_tokens(record.token_assignment)
    if record.streaming is not None and not 1 <= record.streaming.n_slots <= MAX_SLOTS:
        raise PlanError(f"the plan has a ring of {record.streaming.n_slots} slots; 1 to {MAX_SLOTS} are possible")
    seen: set[str] = set()
    for placement in record.operators:
        if placement.name in seen:
            raise PlanError(f"operator {placement.name} is placed twice; keep one of the two")
        seen.add(placement.name)
        fractions = (placement.gg, placement.cg, placement.cc)
        if not all(math.isfinite(fraction) and 0 <= fraction <= 1 for fraction in fractions):
            raise PlanError(f"operator {placement.name} has a fraction outside 0..1: gg, cg, cc = {fractions}")
        if abs(math.fsum(fractions) - 1) > FRACTION_TOLERANCE:
            raise PlanError(
                f"operator {placement.name}: gg + cg + cc is {math.fsum(fractions):.9g} but must be 1 "
                f"(gg, cg, cc = {fractions})"
            )


def _check_tokens(table: Sequence[tuple[int, int]]) -> None:
    """n_tokens strictly ascending, and no more tokens on the device than there are."""
    last = 0
    for n_tokens, n_g in table:
        if n_tokens <= last or not 0 <= n_g <= n_tokens:
            raise PlanError(f"token_assignment: n_g is {n_g} at {n_tokens} tokens; n_tokens must rise, n_g be no more")
        last = n_tokens


def _placement_to_json(placement: OperatorPlacement) -> dict[str, Any]:
    row: dict[str, Any] = {"name": placement.name, "gg": placement.gg, "cg": placement.cg, "cc": placement.cc}
    if placement.layout is not None:
        row["layout"] = placement.layout
    return row


def _placement_from_json(row: Reader) -> OperatorPlacement:
    layout = row.text("layout") if row.document.get("layout") is not None else None
    return OperatorPlacement(row.text("name"), row.number("gg"), row.number("cg"), row.number("cc"), layout)


def _streaming_from_json(section: Reader) -> StreamSettings:
    prefetch = section.text("prefetch")
    for known in get_args(PrefetchMode):
        if prefetch == known:
            return StreamSettings(
                section.whole("n_slots"),
                known,
                section.flag("kept_twice"),
                section.whole("piece_bytes", least=0, default=0),
                section.whole("link_bytes_per_s", least=0, default=0),
            )
    raise PlanError(f"{section.source}: prefetch is {prefetch!r}, but {' or '.join(get_args(PrefetchMode))} is needed")


def _attention_from_json(said: Any) -> Attention | None:
    """None for a plan that says nothing of it, as those written before 2026-11-21."""
    if said is None:
        return None

    def choice(name: str, known: Iterable[str]) -> str:
        value = said.get(name) if isinstance(said, dict) else None
        if isinstance(value, str) and value in known:
            return value
        raise PlanError(
            f"the plan's attention.{name} is {shown(value)}, but one of {', '.join(known)} is needed; make a new plan"
        )

    flash_attn = cast("FlashAttention", choice("flash_attn", FLASH_ATTENTION))
    return Attention(flash_attn, choice("type_k", CACHE_TYPES), choice("type_v", CACHE_TYPES))


def _same_names(planned: Iterable[str], actual: Sequence[str]) -> None:
    planned_set, actual_set = set(planned), set(actual)
    missing, unknown = sorted(actual_set - planned_set), sorted(planned_set - actual_set)
    if missing:
        raise PlanError(f"the plan has no place for {_some(missing)}; make a new plan for this model")
    if unknown:
        raise PlanError(f"the plan places {_some(unknown)}, which this model does not have; make a new plan for it")


def _some(names: list[str]) -> str:
    return f"operator {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
