"""A plan as the text that libggml-oallama reads (ggml_bridge/native/split/ggml-oallama.h): which slice of which tensor
lies where. The engine hands it over in memory, stock binaries read it from the file that OALLAMA_PLAN names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import and_

from oallama.core.errors import PlanError
from oallama.core.types import CPU_DEVICE, Operator, OperatorPlacement, StreamSettings
from oallama.cost.blocks import SUM_BYTES, chunk_of, residents, takes_n_g
from oallama.model.cut import cut_axis
from oallama.plan.patterns import needs_split, split_names
from oallama.plan.plan import Plan
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
    device_name: str | None,
    every_operator: bool = False,
    counts: bool = False,
) -> str:
    """The plan text: format, model fingerprint, device, from where on experts' results are added up, bytes left for
    activations and the ring there, how weights are streamed, and one line for each split operator, in graph order.

    n_layer: blocks of the model, as `-ngl` counts them. device_name: ggml's name of the device that holds GG (`RPC0`),
    not the --device spec that makes it; None: none holds any.
    every_operator: list the operators that lie whole on one side too; the plugin then takes all that `-ot` gives it.
    counts: the plugin counts how often experts are used, of those in host memory too.
    CC without a named layout is plain (CPU): the plugin asks for one it can slice. Raises PlanError for an operator
    without a placement, and for names that the format cannot carry.
    """
    by_name = {placement.name: placement for placement in plan.operators}
    lines = [FORMAT, f"model {_word(plan.model_fingerprint)}"]
    lines += [] if device_name is None else [f"device {_word(device_name)}"]
    lines += [_SUM, "count 1"] if counts else [_SUM]
    if plan.memory.staging > 0:
        lines.append(f"staging {plan.memory.staging}")
    lines += _stream_lines(plan)
    split = split_names(plan, operators, counts)
    for operator in operators:
        if operator.name not in by_name:
            raise PlanError(f"the plan does not place operator {operator.name}; make a new plan for this model")
    resident = _residents(operators, by_name, n_layer + 1 - plan.n_gpu_layers, plan.residents)
    for operator, lives in zip(operators, resident, strict=True):
        if every_operator or operator.name in split:
            line = _tensor_line(operator, by_name[operator.name], lives)
            no_n_g = plan.token_assignment and not (takes_n_g(operator) and by_name[operator.name].device == 0)
            lines.append(f"{line} n_g=0" if no_n_g else line)
    return "\n".join(lines) + "\n"


def split_text(
    operators: Sequence[Operator],
    placements: Sequence[OperatorPlacement],
    first_device_layer: int,
    streams_tokens: bool = False,
    residents: bool = True,
) -> str:
    """Which tensors are split and along which axis, as a plan text that leaves all of them on the host; "" if none
    is. A no_alloc load needs no more to give the plugin what it would get but the device's line, where it has one.
    Raises PlanError."""
    by_name = {placement.name: placement for placement in placements}
    lives = _residents(operators, by_name, first_device_layer, residents)
    lines = [
        _tensor_line(operator, OperatorPlacement(operator.name, 0.0, 0.0, 1.0), resident)
        for operator, resident in zip(operators, lives, strict=True)
        if needs_split(operator, by_name[operator.name], streams_tokens)
    ]
    return "\n".join([FORMAT, _SUM, *lines]) + "\n" if lines else ""


def _stream_lines(record: Plan) -> list[str]:
    """Write the settings that differ from the plugin's defaults: size of the ring, how copies run ahead, their pieces,
    the link's speed, a second copy of CC, whether hot experts are exchanged; and n_g by batch size. Writes nothing for
    a plan that copies nothing."""
    streaming, default = record.streaming or StreamSettings(), StreamSettings()
    exchanges = streaming.exchange != "off" and any(placement.hot_experts for placement in record.operators)
    if not record.token_assignment and not exchanges and not any(placement.cg for placement in record.operators):
        return []
    lines = [f"slots {streaming.n_slots}"] if streaming.n_slots != default.n_slots else []
    lines += [f"ring {streaming.ring_bytes}"] if streaming.ring_bytes else []
    lines += [f"prefetch {streaming.prefetch}"] if streaming.prefetch != default.prefetch else []
    lines += [f"piece {streaming.piece_bytes}"] if streaming.piece_bytes else []
    lines += [f"link {streaming.link_bytes_per_s}"] if streaming.link_bytes_per_s else []
    lines += ["twice 1"] if streaming.kept_twice else []
    lines += [f"exchange {streaming.exchange}"] if exchanges else []
    return lines + [f"tokens {n_tokens} {n_g}" for n_tokens, n_g in record.token_assignment]


def _residents(
    operators: Sequence[Operator], by_name: Mapping[str, OperatorPlacement], first_device_layer: int, taken: bool
) -> tuple[bool, ...]:
    on_device = [by_name[operator.name].gg == 1 for operator in operators]
    beside = [by_name[operator.name].device == 0 for operator in operators]  # of several, the device with the slices
    found = residents(operators, on_device, first_device_layer, taken)
    return tuple(map(and_, found, beside))


def _tensor_line(operator: Operator, placement: OperatorPlacement, resident: bool) -> str:
    cc, cg, gg = slice_counts(operator, placement)
    shape = "x".join(str(extent) for extent in operator.shape)
    layout = _word(placement.layout or CPU_DEVICE) if cc else _NO_LAYOUT
    line = f"tensor {_word(operator.name)} {operator.type} {shape} {cut_axis(operator)} {cc} {cg} {gg} {layout}"
    line += f" hot={','.join(map(str, placement.hot_experts))}" if placement.hot_experts else ""
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
