"""A plan as the text that libggml-oallama reads (ggml_bridge/native/split/ggml-oallama.h): which slice of which tensor
lies where. llama-server and other stock programs read it from the file that OALLAMA_PLAN names; a load into this
process (run/split.py) passes it in memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from oallama.core.errors import PlanError
from oallama.core.types import (
    PLAIN_LAYOUT,
    Operator,
    OperatorPlacement,
    SplitSettings,
    StreamSettings,
    devices_with_n_g,
    settings_of,
)
from oallama.cost.blocks import SUM_BYTES, chunk_of, residents, takes_n_g
from oallama.model.cut import cut_axis
from oallama.plan.patterns import needs_split, split_names
from oallama.plan.plan import Plan, rows_of
from oallama.plan.split import slice_counts

FORMAT = "oallama-plan 1"
"""First line: the format and its version."""

_SUM = f"sum {SUM_BYTES}"  # decides what the plugin claims, so a no_alloc load has it too
_NO_LAYOUT = "-"  # there is no CC slice that could have one
_NAME_BYTES = 127  # OALLAMA_NAME_BYTES with its terminating zero


def plugin_text(
    plan: Plan,
    operators: Sequence[Operator],
    n_layer: int,
    device_names: Sequence[str],
    every_operator: bool = False,
    counts: bool = False,
) -> str:
    """The plan text: format and model fingerprint; then for each device with split operators its name, its settings
    (staging, streaming), and one line for each split operator, in graph order. native/split/ggml-oallama.h describes
    each line.

    n_layer: layers of the model. device_names: ggml's names of the devices that hold GG (`RPC0`), not their --device
    texts; empty: no device.
    every_operator: also list operators that are whole on one side, so that the plugin accepts all that `-ot` gives it.
    counts: the plugin counts expert uses, also of experts in host memory.
    CC without a named layout is plain (CPU). Raises PlanError for an operator
    without a row, and for names that the format cannot carry.
    """
    rows = rows_of(operators, plan.operators)
    lines, of_all = [FORMAT, f"model {_word(plan.model_fingerprint)}"], [_SUM, "count 1"] if counts else [_SUM]
    split = split_names(plan, operators, counts)
    settings = plan.split_settings
    resident = _residents(operators, rows, n_layer + 1 - plan.n_gpu_layers, settings)
    memories = plan.memory.devices or (plan.memory,) * max(1, len(device_names))
    for device in range(max(1, len(device_names))):
        device_settings = settings_of(settings, device)
        tensors = [
            _tensor_line(operator, row, lives)
            + (" n_g=0" if device_settings.token_assignment and not takes_n_g(operator) else "")
            for operator, row, lives in zip(operators, rows, resident, strict=True)
            if (every_operator or operator.name in split) and row.device == device
        ]
        if not tensors and len(device_names) > 1:
            continue
        lines += [*(f"device {_word(name)}" for name in device_names[device : device + 1]), *of_all]
        of_all = []
        lines += [f"staging {memories[device].staging}"] if memories[device].staging > 0 else []
        own_rows = [row for row in rows if row.device == device]
        has_hot, streams = any(row.hot_experts for row in own_rows), any(row.cg for row in own_rows)
        lines += [*_stream_lines(device_settings, has_hot, streams), *tensors]
    return "\n".join(lines) + "\n"


def split_texts(
    operators: Sequence[Operator],
    rows: Sequence[OperatorPlacement],
    first_device_layer: int,
    settings: Sequence[SplitSettings] = (SplitSettings(),),
) -> tuple[str, ...]:
    """A plan text for a no_alloc load, in one part per device (up to the last with split operators): it says which
    tensors are split, along which axis, and which have hot experts, whose biases the plugin adds, but leaves all slices
    on the host, and lacks the device lines, which the load adds. Raises PlanError."""
    rows, with_n_g = rows_of(operators, rows), devices_with_n_g(settings)
    lines: dict[int, list[str]] = {}
    resident = _residents(operators, rows, first_device_layer, settings)
    for operator, row, lives in zip(operators, rows, resident, strict=True):
        if needs_split(operator, row, with_n_g):
            hot = (0,) if row.hot_experts else ()  # whichever they are: plans that differ in them share a load
            on_host = OperatorPlacement(operator.name, 0.0, 0.0, 1.0, hot_experts=hot)
            lines.setdefault(row.device, []).append(_tensor_line(operator, on_host, lives))
    heads = {0: [FORMAT, _SUM]}
    device_lines = ([*heads.get(device, ()), *lines.get(device, ())] for device in range(max(lines, default=-1) + 1))
    return tuple("".join(f"{line}\n" for line in part_lines) for part_lines in device_lines)


def _stream_lines(settings: SplitSettings, has_hot: bool, streams: bool) -> list[str]:
    """The lines of settings that differ from the plugin's defaults: size of the ring, how copies run ahead, their
    pieces, the link's speed, a second copy of CC, whether hot experts are exchanged; and n_g by batch size. Empty if
    nothing is copied. has_hot, streams: whether the device has hot experts, or CG."""
    streaming, default = settings.streaming or StreamSettings(), StreamSettings()
    exchanges = streaming.exchange != "off" and has_hot
    if not (settings.token_assignment or exchanges or streams):
        return []
    lines = [f"slots {streaming.n_slots}"] if streaming.n_slots != default.n_slots else []
    lines += [f"ring {streaming.ring_bytes}"] if streaming.ring_bytes else []
    lines += [f"prefetch {streaming.prefetch}"] if streaming.prefetch != default.prefetch else []
    lines += [f"piece {streaming.piece_bytes}"] if streaming.piece_bytes else []
    lines += [f"link {streaming.link_bytes_per_s}"] if streaming.link_bytes_per_s else []
    lines += ["twice 1"] if streaming.kept_twice else []
    lines += [f"exchange {streaming.exchange}"] if exchanges else []
    return lines + [f"tokens {n_tokens} {n_g}" for n_tokens, n_g in settings.token_assignment]


def _residents(
    operators: Sequence[Operator],
    rows: Sequence[OperatorPlacement],
    first_device_layer: int,
    settings: Sequence[SplitSettings],
) -> tuple[bool, ...]:
    """Whether each operator's inputs and results are on its device; the layers of each device are checked apart."""
    flags = [False] * len(operators)
    for device in sorted({row.device for row in rows}):
        members = [i for i, row in enumerate(rows) if row.device == device]
        begin = next((o.layer for o in (operators[i] for i in members) if o.layer is not None), 0)
        lives = residents(
            [operators[i] for i in members],
            [rows[i].gg == 1 for i in members],
            begin if device else first_device_layer,
            settings_of(settings, device).residents,
            is_later_device=device > 0,
            hot=[member for member, i in enumerate(members) if rows[i].hot_experts],
        )
        for i, is_resident in zip(members, lives, strict=True):
            flags[i] = is_resident
    return tuple(flags)


def _tensor_line(operator: Operator, row: OperatorPlacement, resident: bool) -> str:
    cc, cg, gg = slice_counts(operator, row)
    shape = "x".join(str(extent) for extent in operator.shape)
    layout = _word(row.layout or PLAIN_LAYOUT) if cc else _NO_LAYOUT
    line = f"tensor {_word(operator.name)} {operator.type} {shape} {cut_axis(operator)} {cc} {cg} {gg} {layout}"
    line += f" hot={','.join(map(str, row.hot_experts))}" if row.hot_experts else ""
    line += " resident" if resident else ""
    line += " input=F32" if operator.input_f32 else ""
    chunk = chunk_of(operator)
    line += f" chunk={chunk}" if chunk else ""
    return line


def _word(name: str) -> str:
    if not name.isprintable() or name.split() != [name] or len(name.encode()) > _NAME_BYTES:
        raise PlanError(
            f"{name!r} is not allowed in a plugin's plan file: use a printable name of 1-127 bytes without spaces"
        )
    return name
