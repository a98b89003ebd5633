"""Predicted seconds of whole operators where several devices have a range of layers each. Pure.

llama.cpp gives the layers from first_device_layer on to its devices in their order (`-ts`), so each has one range; the
layers before are on the host. A range is priced as on one device (cost/whole.py); at its end one activation is copied
to the next device. In large batches the first device computes all offloaded host weights, whatever device their layer
is on, and the nodes without weights between them; copies of the residual stream are not counted then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from oallama.core.profile import LinearFit
from oallama.cost.whole import Costs, placement_seconds


@dataclass(frozen=True, slots=True)
class DeviceCosts:
    """Prices on one of several devices. entered: fit of a copy to it from each earlier device. is_remote: on another
    machine; then it has whole layers only, so that a token is sent over the network once."""

    costs: Costs
    entered: tuple[LinearFit, ...]
    is_remote: bool = False


def ranges_seconds(
    devices: Sequence[DeviceCosts], device_layers: Sequence[int], on_device: Sequence[bool], first_device_layer: int,
    sliced_s: Mapping[int, float],
) -> float:  # fmt: skip
    """Predicted total seconds of all passes. device_layers: number of layers of each device, the output counted as one
    layer; they add up to the layers from first_device_layer on. on_device: whether an operator is on its layer's
    device. sliced_s: seconds of ranges with slices (cost/slices.py), by device; the first range includes the host's
    layers."""
    total, begin, last = 0.0, first_device_layer, None
    graph = devices[0].costs.graph
    for number, (device, n_layers) in enumerate(zip(devices, device_layers, strict=True)):
        own_s = sliced_s.get(number)
        if not n_layers and own_s is None:
            continue
        end = begin + n_layers
        if own_s is None:
            window = (0 if last is None else begin, end)
            own_s = placement_seconds(device.costs, on_device, begin, window=window)
        total += own_s
        if last is not None:
            total += entry_seconds(device, last, begin)
        begin, last = end, number
    if last is None:
        total = placement_seconds(devices[0].costs, on_device, begin, window=(0, begin))
    assert begin == graph.n_layer + 1, "every layer behind the first has a device"
    return total


def entry_seconds(device: DeviceCosts, last: int, layer: int) -> float:
    """Seconds to copy a layer's input from device `last`, which has the layer before."""
    previous, link = device.costs.graph.layers[layer].previous, device.entered[last]
    assert previous is not None, "there is a layer before"
    tokens = ((p.count, p.n_outputs if previous.outputs_only else p.n_tokens) for p in device.costs.passes)
    return sum(count * link.seconds(n * previous.bytes_per_token) for count, n in tokens if n)
