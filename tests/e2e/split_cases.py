"""Plans that split operators, made by hand: how much of each goes to the device is said by a share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from e2e.placed import ALL_LAYERS, Placed, Where, placed, probe
from gguf_factory import write_gguf

from oallama.core.types import Operator, OperatorPlacement
from oallama.cost.blocks import is_ffn
from oallama.device.load_params import LoadSettings
from oallama.model.cut import cut_extent, cut_granularity
from oallama.plan.patterns import host_patterns, is_split
from oallama.plan.plugin_text import split_text


def written(models: Path, arch: str, **shape: Any) -> Path:
    """The model of that shape (as gguf_factory takes it), made once in the folder."""
    path = models / f"{'-'.join([arch, *map(str, shape.values())])}.gguf"
    return path if path.is_file() else write_gguf(path, arch, **shape)


Share = Callable[[Operator], float | None]
"""Share of an operator that goes to the device; None: not split, it stays in host memory."""


def ffn(share: float) -> Share:
    """The same share of all FFNs, experts included, routers not."""
    return lambda operator: share if is_ffn(operator) else None


def everything(share: float) -> Share:
    """Of every operator but tied embeddings, which are read whole."""
    return lambda operator: None if operator.name == "token_embd.weight" else share


def split_placements(
    operators: Sequence[Operator], share: Share, layout: str | None = None
) -> tuple[OperatorPlacement, ...]:
    """Placements with the cuts nearest to the shares that are possible: gate, up and down of one FFN at one element.

    A share other than 0 and 1 leaves something on either side, where the operator can be cut at all.
    """
    steps: dict[object, int] = defaultdict(lambda: 1)
    for operator in operators:
        steps[block_of(operator)] = max(steps[block_of(operator)], cut_granularity(operator))
    made = []
    for operator in operators:
        wanted, extent, step = share(operator), cut_extent(operator), steps[block_of(operator)]
        if wanted is None or (extent <= step and wanted < 1):
            cc = extent
        elif wanted in (0, 1):
            cc = round((1 - wanted) * extent)
        else:
            cc = min(max(round((1 - wanted) * extent / step), 1) * step, (extent - 1) // step * step)
        named = layout if cc and wanted is not None else None
        made.append(
            OperatorPlacement(name=operator.name, gg=(extent - cc) / extent, cg=0.0, cc=cc / extent, layout=named)
        )
    return tuple(made)


def block_of(operator: Operator) -> object:
    """Operators that are cut at the same element: those of one FFN; any other is a block of its own."""
    if not is_ffn(operator):
        return operator.name
    kind = next((kind for kind in ("_exps", "_shexp", "_chexps") if operator.role.endswith(kind)), "")
    return operator.layer, kind


def split_case(
    path: Path, device: str, share: Share, layout: str | None = None, whole: Where | None = None, n_ctx: int = 256
) -> Placed:
    """`path` with its operators cut by share, its ledger filled. Those of `whole` go to the device uncut, and with them
    norms and KV."""
    case = placed(path, n_ctx=n_ctx)
    placements = with_whole(case, split_placements(case.operators, share, layout), whole)
    there = sum(
        round(placement.gg * operator.bytes)
        for operator, placement in zip(case.operators, placements, strict=True)
        if is_split(operator, placement, False)
    )
    return with_ledger(case, device, placements, whole, there, -there)


def with_whole(
    case: Placed, placements: Sequence[OperatorPlacement], whole: Where | None
) -> tuple[OperatorPlacement, ...]:
    """The placements, but for operators of `whole`, which are on the device."""
    return tuple(
        OperatorPlacement(name=operator.name, gg=1.0, cg=0.0, cc=0.0)
        if whole is not None and whole(operator)
        else placement
        for operator, placement in zip(case.operators, placements, strict=True)
    )


def with_ledger(
    case: Placed,
    device: str,
    placements: tuple[OperatorPlacement, ...],
    whole: Where | None,
    there: int,
    on_host: int,
    **ledger: int,
) -> Placed:
    """The case with these placements, its ledger filled: what a dry load takes, and what the split backend adds to the
    weights on the device and on the host."""
    n_gpu_layers = ALL_LAYERS if whole is not None else 0
    settings: LoadSettings = replace(
        case.request,
        device=device,
        n_gpu_layers=n_gpu_layers,
        split_text=""
        if whole is None
        else split_text(case.operators, placements, case.model.n_layer + 1 - n_gpu_layers),
        host_patterns=host_patterns(case.operators, placements, case.tensor_names),
    )
    probed = probe(settings)
    memory = replace(
        case.plan.memory,
        weights_gpu=probed.on_device("model") + there,
        weights_host=probed.on_host("model") + on_host,
        kv=probed.on_device("context"),
        compute=probed.on_device("compute"),
        **ledger,
    )
    record = replace(
        case.plan,
        device=device,
        policy="split",
        operators=placements,
        n_gpu_layers=settings.n_gpu_layers,
        memory=memory,
    )
    return replace(case, plan=record, request=settings, probed=probed)


def streaming_case(
    path: Path,
    device: str,
    cut: Callable[[Operator], tuple[float, float]],
    layout: str | None = None,
    **record: Any,
) -> Placed:
    """`path` with its FFNs cut into (gg, cg) shares, the rest CC; its ledger is not filled."""
    case = placed(path)
    shares = {operator.name: cut(operator) for operator in case.operators if is_ffn(operator)}
    there = split_placements(case.operators, lambda o: sum(shares[o.name]) if o.name in shares else None)
    placements = []
    for operator, placement in zip(case.operators, there, strict=True):
        share = shares.get(operator.name)
        if share is not None:
            extent, step = cut_extent(operator), cut_granularity(operator)
            gg = min(round(share[0] * extent / step) * step, round(placement.gg * extent))
            cg = round(placement.gg * extent) - gg
            placement = OperatorPlacement(
                name=placement.name, gg=gg / extent, cg=cg / extent, cc=placement.cc, layout=layout
            )
        placements.append(placement)
    made = replace(case.plan, device=device, policy="scheinfer", n_gpu_layers=0, operators=tuple(placements), **record)
    patterns = host_patterns(case.operators, placements, case.tensor_names, bool(made.token_assignment))
    request = replace(case.request, device=device, n_gpu_layers=0, host_patterns=patterns)
    return replace(case, plan=made, request=request)
