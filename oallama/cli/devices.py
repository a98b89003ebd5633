"""`oallama devices`: list the CPU and GPUs."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from oallama.cli.help import Command
from oallama.cli.options import backend_option, json_option
from oallama.cli.output import emit_json, log, show


@click.command("devices", cls=Command)
@backend_option
@json_option
def command(as_json: bool) -> None:
    """List ggml's devices with their memory, and the CPU.

    Use a name in the first column as --device. The `emulated` device is created on request and not listed.
    """
    from oallama.device.opening import list_devices
    from oallama.report.inspect import device_document, devices_table

    devices = list_devices()
    cpu, versions = cpu_document()
    if as_json:
        emit_json({"devices": [device_document(device) for device in devices], "cpu": cpu, **versions})
        return
    cores = f"{cpu['physical_cores']} cores, {cpu['logical_cores']} logical, {cpu['threads']} threads by default"
    libraries = f"ggml {versions['ggml_version']}, llama-cpp-python {versions['llama_cpp_python']}"
    show(
        [devices_table(devices, (f"CPU: {cpu['name']}, {cores}", f"features: {' '.join(cpu['features'])}", libraries))]
    )
    if not any(device.type in ("GPU", "IGPU") for device in devices):
        log("no GPU found: `--device emulated:rtx3060` emulates a GPU's timing")


def cpu_document() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (`cpu` of the JSON, the versions of the native libraries)."""
    from oallama.profile.emulate import this_host, usual_threads
    from oallama.profile.machine import fingerprint

    threads = usual_threads(partial(this_host, say=log))
    machine = fingerprint(threads, "none")
    cpu = {
        "name": machine["cpu"],
        "physical_cores": machine["cores_physical"],
        "logical_cores": machine["cores_logical"],
        "threads": threads,
        "features": machine["cpu_features"],
    }
    return cpu, {name: machine[name] for name in ("ggml_version", "llama_cpp_python")}
