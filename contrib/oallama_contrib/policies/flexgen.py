"""The `flexgen` policy, to compare with: weights as FlexGen places them (Sheng et al., ICML 2023, section 4.2). A share
of each layer's lies on the device, the rest in host memory; all of that is streamed to the device, which computes
everything.

The share is as large as memory allows, where FlexGen finds it with KV and activations by a linear program. Not here:
attention on the CPU, its schedule of several batches, compression, disks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from oallama.cost.slices import BlockType, Cut
from oallama.planner.placement import Placement
from oallama.planner.policies.registry import PolicyInputs, policy
from oallama.planner.problem import Problem
from oallama_contrib.policies.modules import Module, place_in_order


def streamed(kind: BlockType) -> Cut:
    """All of a block, CG = 1."""
    return Cut(0, kind.block.extent, 0)


def order(modules: Sequence[Module]) -> list[int]:
    """What cannot be streamed first. Then the last modules of every layer, as FlexGen's share begins at a layer's end;
    where memory does not last for those of all layers, of layers that lie evenly among the others, so that copies have
    what is computed on either side of them to hide behind."""
    in_layer: dict[int | None, int] = {}
    from_end: dict[int, int] = {}
    for i in reversed(range(len(modules))):
        from_end[i] = in_layer.get(modules[i].layer, 0)
        in_layer[modules[i].layer] = from_end[i] + 1
    n_bits = max((module.layer for module in modules if module.layer is not None), default=0).bit_length()

    def rank(i: int) -> tuple[int, int, int]:
        module = modules[i]
        if module.cut is None or module.layer is None:
            return (-1, 0, i)
        return (from_end[i], _reversed_bits(module.layer, n_bits), i)

    return sorted(range(len(modules)), key=rank)


def _reversed_bits(number: int, n_bits: int) -> int:
    """Numbers by rising reversed bits: any first ones of them lie evenly (van der Corput's sequence)."""
    return int(f"{number:0{n_bits}b}"[::-1], 2) if n_bits else 0


@policy(
    "flexgen", "all weights that are not on the device streamed to it", streams=True,
    keeps_ubatch=True,
    caveat="only FlexGen's weight placement: not its attention on the CPU, its batch schedule or its linear "
    "program",
)  # fmt: skip
def flexgen(problem: Problem, inputs: PolicyInputs) -> Iterable[Placement]:
    yield place_in_order(problem, inputs, streamed, order)
