"""Kinds of steps: each returns what it found, or says why there is nothing."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.child import Ended, json_lines, oallama, run_child
from experiments.machine import backend_of, describe
from experiments.results import StepFailed

from gpu_steps.steps import GpuStep

SWITCHES: Mapping[str, Mapping[str, dict[str, str]]] = {
    "CUDA": {
        "CUDA graphs off": {"GGML_CUDA_DISABLE_GRAPHS": "1"},
        "pinned memory off": {"GGML_CUDA_NO_PINNED": "1"},
        "fusion off": {"GGML_CUDA_DISABLE_FUSION": "1"},
    },
    "Vulkan": {"fusion off": {"GGML_VK_DISABLE_FUSION": "1"}},
}
"""Backend -> what is switched -> environment. Read by ggml when it starts, so each setting is a process of its own."""


@dataclass(frozen=True)
class StepSetting:
    """What all steps share. threads: of the arms; cpus: a list they are pinned to, or ""."""

    device: str
    threads: int
    cpus: str
    work: Path
    log: Path
    manifest: Mapping[str, Any]
    model_path: Callable[[str], Path]

    def raw(self, name: str) -> Path:
        """A file for what a child finds; there is none yet."""
        path = self.work / "raw" / name
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        return path

    def oallama(self, *arguments: object, limit_s: float, env: Mapping[str, str] | None = None) -> Ended:
        return oallama(*arguments, limit_s=limit_s, log=self.log, env=env)

    def child(
        self, case: str, name: str, settings: Mapping[str, Any], limit_s: float, env: Mapping[str, str] | None = None
    ) -> tuple[Ended, list[dict[str, Any]]]:
        """How gpu_steps.child ended, and the rows it wrote."""
        out = self.raw(f"{name}.jsonl")
        text = json.dumps({**settings, "device": self.device})
        ended = run_child([sys.executable, "-m", "gpu_steps.child", case, text, str(out)], limit_s, self.log, env)
        return ended, json_lines(out)


def run_step(step: GpuStep, setting: StepSetting, limit_s: float, tries: int) -> Any:
    """What the step found. Raises StepFailed."""
    return KINDS[step.kind](step, setting, limit_s, tries)


def machine(step: GpuStep, setting: StepSetting, limit_s: float, tries: int) -> Any:
    """Processor, memory, cards, versions; nothing that names the machine."""
    found = describe(setting.threads, setting.device)
    found["pack"] = {key: value for key, value in setting.manifest.items() if key != "platform"}
    return found


def doctor(step: GpuStep, setting: StepSetting, limit_s: float, tries: int) -> Any:
    ended = setting.oallama("doctor", "--json", limit_s=limit_s)
    listed = setting.oallama("devices", "--json", limit_s=60)
    if not ended.out.strip():
        raise StepFailed(f"doctor said nothing: {ended.why}", late=ended.late)
    checks = json.loads(ended.out)["checks"]
    devices = json.loads(listed.out)["devices"] if listed.status == 0 else []
    data = {
        "checks": [{key: check[key] for key in ("name", "ok", "remedy")} for check in checks],
        "devices": [{key: value for key, value in device.items() if key != "memory_free"} for device in devices],
    }
    bad = [check for check in checks if not check["ok"]]
    named = setting.device.split(":")[0]
    if bad:
        raise StepFailed(f"{bad[0]['name']}: {bad[0]['detail']}"[:400], data)
    if backend_of(setting.device) not in ("RPC", "cpu-pair", "emulated") and named not in [
        device["name"] for device in devices
    ]:
        names = ", ".join(device["name"] for device in devices)
        raise StepFailed(f"there is no device {named}; there are: {names}; is the driver's library found?", data)
    return data


def correctness(step: GpuStep, setting: StepSetting, limit_s: float, tries: int) -> Any:
    ended, rows = setting.child("correctness", step.id, step.settings, limit_s)
    if ended.status != 0:
        died = rows[-1] if rows else {"arch": "the", "type": "first"}
        why = ended.why if ended.late else f"it ended with {ended.status}: {ended.why}"
        raise StepFailed(f"after {died['arch']} {died['type']}: {why}", rows, ended.late)
    wrong = [row for row in rows if row["verdict"] == "differs"]
    if wrong or all(row["verdict"] != "ok" for row in rows):
        first = (wrong or rows)[0]
        raise StepFailed(f"{first['arch']} {first['type']}: {first['verdict']}", rows)
    return rows


def profile(step: GpuStep, setting: StepSetting, limit_s: float, tries: int) -> Any:
    path, threads = setting.model_path(step.settings["model"]), step.settings["threads"] or setting.threads
    tokens = ",".join(map(str, step.settings["tokens"]))
    ended = setting.oallama("profile", path, "--device", setting.device, "--threads", threads, "--tokens", tokens,
                            "--json", limit_s=limit_s)  # fmt: skip
    if ended.status != 0:
        raise StepFailed(ended.why, late=ended.late)
    found = json.loads(ended.out)
    keys = ("device", "layout", "type", "shape", "n_expert_used", "n_tokens", "seconds", "gb_per_s", "gflops")
    return {
        **{key: found[key] for key in ("device", "link", "boundary", "contention", "launch_s", "warnings")},
        "model": step.settings["model"],
        "threads": threads,
        "cases": [{key: case[key] for key in keys} for case in found["cases"]],
    }


ROW_KEYS = (
    "arm", "model_size", "n_threads", "n_prompt", "n_gen", "n_depth", "avg_ts", "samples_ns", "samples_ttft_s",
    "samples_tpot_s", "ttft_s", "tpot_s", "ttft_ratio_to_first", "ttft_ratio_ci95", "tpot_ratio_to_first",
    "tpot_ratio_ci95", "ratio_to_first", "ratio_ci95", "ratio_refused", "device_bytes", "host_bytes",
    "operator_bytes_on_device", "cap_device_bytes", "cap_operator_bytes", "flash_attn_used", "problems", "predicted",
    "bound", "notes", "same_as", "warnings", "gate", "cpu_info", "gpu_info",
)  # fmt: skip


def ab(step: GpuStep, setting: StepSetting, limit_s: float, tries: int) -> Any:
    """`oallama bench`. What a cell that is cut short has measured is kept; a second try leaves newer arms out."""
    given = step.settings
    arms = given["arms"] if tries == 1 else [arm for arm in given["arms"] if arm.startswith("stock") or arm == "oato"]
    out = setting.raw(f"{step.id}.json")
    arguments: list[object] = [
        "bench", setting.model_path(given["model"]), "--arms", ",".join(arms), "--device", setting.device, "--threads",
        setting.threads, *given["cap"], "-p", "0", "-n", "0", "-pg", f"{given['n_prompt']},{given['n_gen']}", "-r",
        given["repetitions"], "--no-progress", "-o", out,
    ]  # fmt: skip
    arguments += ["-ub", given["n_ubatch"]] if "n_ubatch" in given else []
    arguments += ["--cpus", setting.cpus] if setting.cpus else []
    ended = setting.oallama(*arguments, limit_s=limit_s)
    try:
        rows = json.loads(out.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        rows = []
    kept = [{key: row[key] for key in ROW_KEYS if key in row} for row in rows]
    data = {"arms": arms, "cap": given["shown_cap"], "paper": given["paper"], "model": given["model"],
            "n_prompt": given["n_prompt"], "n_gen": given["n_gen"],
            "n_ubatch": given.get("n_ubatch"), "rows": kept}  # fmt: skip
    if ended.status != 0:
        raise StepFailed(ended.why, data if kept else None, ended.late)
    return data


def in_child(step: GpuStep, setting: StepSetting, limit_s: float, tries: int) -> Any:
    """The rows of the case that is named as the step's kind."""
    return _rows(*setting.child(step.kind, step.id, step.settings, limit_s))


def _rows(ended: Ended, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Raises StepFailed, with the rows it got to, where a child failed."""
    if ended.status != 0:
        raise StepFailed(ended.why, rows, ended.late)
    return rows


def _timeline(
    step: GpuStep, setting: StepSetting, name: str, limit_s: float, env: Mapping[str, str], cupti: bool = False
) -> list[dict[str, Any]]:
    settings = {
        **step.settings, "model": str(setting.model_path(step.settings["model"])), "threads": setting.threads,
        "cupti": cupti, "folder": str(setting.work / "raw"),
    }  # fmt: skip
    return _rows(*setting.child("timeline", name, settings, limit_s, env))


def timeline(step: GpuStep, setting: StepSetting, limit_s: float, tries: int) -> Any:
    return _timeline(step, setting, step.id, limit_s, {}, backend_of(setting.device) == "CUDA")


def switches(step: GpuStep, setting: StepSetting, limit_s: float, tries: int) -> Any:
    """Each switch on and off in turns (off on on off), the same plans from the same profile. The control switches
    nothing: what it shows is the noise."""
    found: list[dict[str, Any]] = []
    settings: dict[str, dict[str, str]] = {"nothing (control)": {}, **SWITCHES.get(step.settings["backend"], {})}
    deadline = time.monotonic() + limit_s
    for name, env in settings.items():
        samples: dict[str, dict[str, dict[str, list[float]]]] = {}
        for i, turn in enumerate(("off", "on", "on", "off")):
            try:
                rows = _timeline(
                    step, setting, f"{step.id}-{i}", deadline - time.monotonic(), env if turn == "on" else {}
                )
            except StepFailed as error:
                raise StepFailed(f"{name}: {error}", found, error.late) from None
            for row in rows:
                if row["what"] == "stages":
                    for key, values in row["samples"].items():
                        times = samples.setdefault(row["plan"], {}).setdefault(key, {"off": [], "on": []})
                        times[turn] += values
        found += [
            {"switch": name, "environment": env, "plan": plan, "samples": times, **{
                key.replace("_s", "_ratio"): statistics.median(each["off"]) / statistics.median(each["on"])
                for key, each in times.items()
            }}
            for plan, times in samples.items()
        ]  # fmt: skip
    return found


KINDS: Mapping[str, Callable[[GpuStep, StepSetting, float, int], Any]] = {
    "machine": machine, "doctor": doctor, "correctness": correctness, "profile": profile, "ab": ab, "copies": in_child,
    "device": in_child, "timeline": timeline, "switches": switches,
}  # fmt: skip
