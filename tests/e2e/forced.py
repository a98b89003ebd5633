"""Plans that tests force on a model: how much of each operator goes to the device is said by a share. The memory
breakdown is that of a no_alloc load, as the planner's is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gguf_factory import write_gguf

from oallama.core.types import DecodeStep, Operator, SplitSettings
from oallama.cost.blocks import is_ffn, slice_weights
from oallama.cost.slices import Cut
from oallama.model.cut import cut_extent, cut_granularity
from oallama.placer import Placer
from oallama.plan.plan import Plan
from oallama.planner.memory import memory_breakdown
from oallama.planner.placement import ON_DEVICE, Assignment, DeviceSlices, Placement, unmeasured_record
from oallama.run.engine import Engine

if TYPE_CHECKING:
    from oallama.run.placed_llama import PlacedLlama

N_CTX, N_UBATCH = 256, 64
SETTINGS = tuple(field.name for field in fields(SplitSettings))
ENDLESS_CTX = 32768  # whose end no answer reaches while a test looks

Where = Callable[[Operator], bool]
Share = Callable[[Operator], "tuple[float, float] | float | None"]
"""The share of an operator on the device, or the shares there and streamed; None: all of it is left on the host."""


def attention(operator: Operator) -> bool:
    return operator.role.startswith("attn")


def movable(operator: Operator) -> bool:
    """Tied embeddings are read whole by another operation too."""
    return operator.name != "token_embd.weight"


def ffn(gg: float, cg: float = 0.0) -> Share:
    """The same shares of all FFNs, experts included, routers not."""
    return lambda operator: (gg, cg) if is_ffn(operator) else None


def everything(gg: float, cg: float = 0.0) -> Share:
    return lambda operator: (gg, cg) if movable(operator) else None


def nothing(_operator: Operator) -> None:
    return None


@dataclass(frozen=True)
class Forced:
    """A model with its plan. given: names of the operators that have a share."""

    placer: Placer
    plan: Plan
    given: tuple[str, ...]

    def engine(self, **options: Any) -> Engine:
        return self.placer.engine(self.plan, **options)

    def llama(self, **arguments: Any) -> PlacedLlama:
        return self.placer.llama(self.plan, **{"logits_all": True, **arguments})

    def changed(self, **fields: Any) -> Forced:
        """With another plan."""
        return replace(self, plan=replace(self.plan, **fields))

    def with_breakdown(self, **bytes: int) -> Forced:
        return self.changed(memory=replace(self.plan.memory, **bytes))


def written(models: Path, arch: str, **shape: Any) -> Path:
    """The model of that shape (as gguf_factory takes it), made once in the folder."""
    path = models / f"{'-'.join([arch, *map(str, shape.values())])}.gguf"
    return path if path.is_file() else write_gguf(path, arch, **shape)


def forced(
    path: Path,
    device: str = "none",
    share: Share = nothing,
    *,
    whole: Where | None = None,
    layout: str | None = None,
    hot: Sequence[int] = (),
    n_ctx: int = N_CTX,
    probe: bool = True,
    step: DecodeStep = DecodeStep(),  # noqa: B008 - frozen
    n_outputs: int = 0,
    **others: Any,
) -> Forced:
    """A plan of `path`, with room for the logits of all tokens, which tests read. whole: operators that go to the
    device uncut, and with them norms and KV. layout: in host memory, of what has a share. hot: experts that the device
    has besides. probe False: its memory breakdown is not filled. step: of decode. n_outputs: as Workload's. others: of
    a Placement, or of its SplitSettings."""
    placer = Placer.load(path, device=device, threads=1, n_ctx=n_ctx, n_ubatch=N_UBATCH, flash_attn="on")
    model, operators = placer.model, placer.operators
    places = tuple(
        ON_DEVICE
        if whole is not None and whole(operator)
        else Assignment(cut, None if share(operator) is None else layout, tuple(hot) if operator.routed else ())
        for operator, cut in zip(operators, cuts(operators, share), strict=True)
    )
    first = model.n_layer + 1 if whole is None else 0
    settings = SplitSettings(**{name: others.pop(name) for name in SETTINGS if name in others})
    slices = DeviceSlices(others.pop("gg_bytes", 0), settings=settings), *others.pop("behind_first", ())
    placement = Placement(places, **{"first_device_layer": first, "slices": slices, **others})
    gg_bytes = slice_weights(operators, [0 if place.is_device else place.cut.gg for place in places])
    hot_bytes = sum(o.bytes // o.shape[2] * len(p.hot_experts) for o, p in zip(operators, places, strict=True))
    held, workload = gg_bytes + hot_bytes, replace(placer.workload(8, 8), step=step, n_outputs=n_outputs)
    memory = memory_breakdown(0, 1.0, 0, 0, 0, 0)
    if probe:
        taken = placer.no_alloc_loads.taken(workload, placement, placer.attention)
        on_host = taken.weights_host - gg_bytes
        memory = memory_breakdown(taken.device_free, 0.9, taken.weights_gpu + held, on_host, taken.kv, taken.compute)
    plan = unmeasured_record(model, operators, workload, placement, memory, "split", device)
    plan = replace(plan, attention=placer.attention)
    return Forced(placer, plan, tuple(operator.name for operator in operators if share(operator) is not None))


def cuts(operators: Sequence[Operator], share: Share) -> list[Cut]:
    """The possible cuts nearest to the shares: gate, up and down of one FFN at one element. What is neither whole on
    one side nor too small to be cut has something on either."""
    steps: dict[object, int] = defaultdict(lambda: 1)
    for operator in operators:
        steps[block_of(operator)] = max(steps[block_of(operator)], cut_granularity(operator))
    made = []
    for operator in operators:
        asked, extent, step = share(operator) or 0.0, cut_extent(operator), steps[block_of(operator)]
        gg, cg = asked if isinstance(asked, tuple) else (asked, 0.0)
        if gg + cg in (0, 1):
            there = round((gg + cg) * extent)
        elif extent <= step:
            there = 0
        else:
            there = extent - min(max(round((1 - gg - cg) * extent / step), 1) * step, (extent - 1) // step * step)
        streamed = min(there, round(cg / (gg + cg) * there / step) * step) if gg and cg else there if cg else 0
        made.append(Cut(extent - there, streamed, there - streamed))
    return made


def block_of(operator: Operator) -> object:
    """Operators that are cut at the same element: those of one FFN; any other is a block of its own."""
    if not is_ffn(operator):
        return operator.name
    kind = next((kind for kind in ("_exps", "_shexp", "_chexps") if operator.role.endswith(kind)), "")
    return operator.layer, kind
