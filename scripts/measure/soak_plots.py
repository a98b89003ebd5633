"""The pictures of a soak: what processes hold over loads of an engine, and over tokens of a server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.pictures import COLOURS, GREY, panels

from measure.soak_tokens import ROLES

MIB = 1 << 20


def loads(document: Mapping[str, Any]) -> Any:
    """Resident memory and malloc's bytes over loads, and what the device holds between them."""
    figure, axes = panels(1, 2, (9.2, 3.6), layout="constrained")
    for colour, (name, step) in zip(COLOURS, document["steps"].items(), strict=False):
        x = [sample["loads"] for sample in step["data"]]
        for key, line, label in (("anonymous", "-", "resident"), ("allocated", ":", "malloc")):
            y = [sample[key] / MIB for sample in step["data"]]
            axes[0, 0].plot(x, y, line, color=colour, label=f"{name}, {label}")
        device = [
            (sample["device_bytes"] + sample["pinned_bytes"] + sample["split_bytes"]) / MIB for sample in step["data"]
        ]
        axes[0, 1].plot(x, device, color=colour, label=name)
    axes[0, 0].set(xlabel="loads", ylabel="MiB", ylim=(0, None), title="host memory of the process")
    axes[0, 1].set(xlabel="loads", ylabel="MiB", ylim=(-1, 10), title="device and split back end, after each free")
    axes[0, 0].legend(frameon=False, fontsize=7, ncol=2)
    axes[0, 1].legend(frameon=False, fontsize=7)
    return figure


def tokens(document: Mapping[str, Any]) -> Any:
    """Resident memory over tokens, a panel for each process; dotted: descriptors, on the right."""
    figure, axes = panels(1, len(ROLES), (11.0, 3.6), layout="constrained")
    for axis, role in zip(axes[0], ROLES, strict=True):
        right_axis = axis.twinx()
        for colour, (name, step) in zip(COLOURS, document["steps"].items(), strict=False):
            held = [(sample["tokens"], sample[role]) for sample in step["data"]["samples"] if role in sample]
            x = [n / 1000 for n, _ in held]
            axis.plot(x, [each["anonymous"] / MIB for _, each in held], color=colour, label=name)
            right_axis.plot(x, [each["descriptors"] for _, each in held], ":", color=colour, linewidth=1)
        axis.set(xlabel="1,000 tokens", ylim=(0, None), title=role)
        right_axis.set_ylim(0, None)
        right_axis.tick_params(colors=GREY, labelsize=7)
    axes[0, 0].set_ylabel("resident, MiB")
    axes[0, -1].legend(frameon=False, fontsize=7, loc="lower right")
    return figure
