"""An arm in llama-server, for drafts and for several requests at once.

If one arm of a comparison needs llama-server, every arm is measured in it, by its own timings. The placement is read
back from a process of ours that first loads the same plan or the same options.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from oallama.bench.process import ArmProcess, Deadline
from oallama.bench.records import ArmSpec, BenchTest, LoadReport, Sample
from oallama.core.errors import DeviceError
from oallama.core.temporary import parent_for_server, temporary_folder
from oallama.core.types import DecodeStep, Draft
from oallama.placer import Placer
from oallama.placer.stock import stock_plan
from oallama.plan.plan import Plan
from oallama.run.address import reserved_address
from oallama.run.client import Client, RequestRefused, ServerGone
from oallama.run.plugin_report import ask_report, punctuality
from oallama.run.process import ServerProcess, start_failure
from oallama.run.program import ServerSettings, find_program, launch
from oallama.run.server_options import SYNTHETIC_RATES
from oallama.run.weight_places import usable_plan

START_S, END_S, REPORT_S, HEALTH_S = 1800.0, 5.0, 10.0, 2.0
IDLE_S = 0.3  # until an emulated card that has nothing to do leaves its core to another


def server_plan(placer: Placer, spec: ArmSpec, n_parallel: int = 1) -> Plan:
    """The plan to start an arm's llama-server with: the arm's plan, with the context and KV cache of all arms, or its
    stock options as a plan."""
    load = spec.setting.load
    if (plan := spec.plan) is not None:
        attention = load.attention
        if attention.flash_attn == "auto" and plan.attention is not None:
            attention = replace(attention, flash_attn=plan.attention.flash_attn)
        plan = replace(plan, workload=replace(plan.workload, n_ctx=load.n_ctx), attention=attention)
    else:
        assert spec.stock is not None
        workload = placer.workload(1, 1, load.n_ctx, load.n_ubatch)
        if (draft := spec.draft) is not None and draft.kind == "draft-mtp":
            step = DecodeStep(n_parallel, draft.n_draft, n_slots=n_parallel, mtp=True)
            workload = replace(workload, step=step)
        plan = stock_plan(placer, workload, spec.stock, measure=False)
    usable, _ = usable_plan(replace(plan, device=load.device, draft=spec.draft), placer.operators)
    return usable


class ServerArm:
    """The interface of ArmProcess. n_parallel: requests at once. accepted: acceptance rates of drafts by position, by
    which llama-server draws acceptance (--spec-synth-rates); (): real acceptance."""

    def __init__(
        self,
        spec: ArmSpec,
        deadline: Deadline | None = None,
        *,
        placer: Placer,
        n_parallel: int = 1,
        accepted: tuple[float, ...] = (),
    ) -> None:
        self.spec, self._deadline = spec, deadline
        self._placer, self._n_parallel, self._accepted = placer, n_parallel, accepted
        self._stack = ExitStack()
        self._process: ServerProcess | None = None
        self._report: LoadReport | None = None
        self._n_samples = 0

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def load(self, operators: Sequence[str]) -> LoadReport:
        """Load the model in a process of ours, then in llama-server, and return what the first read back. Raises as
        ArmProcess.load."""
        arm = ArmProcess(self.spec, self._deadline)
        try:
            report = arm.load(operators)
        finally:
            arm.close()
        placer = self._placer
        plan = server_plan(placer, self.spec, self._n_parallel)
        self._folder = self._stack.enter_context(temporary_folder("oallama-bench-", parent_for_server()))
        self._address = self._stack.enter_context(reserved_address("127.0.0.1", 0, None))
        self._client = Client(self._address)
        drawn = _drawn(plan.draft, self._accepted)
        settings = ServerSettings(
            self._address, self._n_parallel, placer.threads, self.spec.setting.load.n_batch,
            Path(placer.model.path).name, None, cache_mib=0, chats=False, shown=False, reuses_prefix=False, more=drawn,
        )  # fmt: skip
        started = launch(
            find_program(None), plan, placer.operators, placer.model.n_layer, placer.tensor_names, settings,
            self._folder, os.environ,
        )  # fmt: skip
        self._process = process = ServerProcess(started)
        why = start_failure(process, lambda pid: self._address.is_healthy(pid, HEALTH_S), self._left_s(START_S))
        if why is not None:
            raise DeviceError(f"llama-server of arm {self.spec.name} does not start: {why}")
        if (draft := plan.draft) is not None:  # what tells it from the arm without drafts
            drafted = {f"{draft.kind}, {draft.n_draft} drafts": (draft.device_bytes + draft.host_bytes, 0, 0)}
            device_bytes = report.device_bytes + draft.device_bytes
            report = replace(report, device_bytes=device_bytes, buffers={**report.buffers, **drafted})
        self._report = report
        return report

    def warm_up(self, tests: Sequence[BenchTest]) -> tuple[int, int]:
        """Run every test once; bytes held on the device, as told for it, and in host memory."""
        assert self._report is not None and self._process is not None
        for test in tests:
            self._ask(test, 0)
        return self._report.device_bytes, self._process.rss_bytes

    def measure(self, tests: Sequence[BenchTest]) -> dict[BenchTest, Sample]:
        self._n_samples += 1  # drafts of every arm's n-th sample are accepted by the same draws
        return {test: self._sample(test) for test in tests}

    def cpu_seconds(self) -> float:
        return 0.0 if self._process is None else self._process.cpu_s

    def close(self) -> None:
        """End it; may be called twice."""
        if self._process is not None:
            self._process.end(END_S)
        self._stack.close()

    def _sample(self, test: BenchTest) -> Sample:
        """Time a test once. An emulated card that was late is a fault, which the schedule measures again."""
        time.sleep(IDLE_S)
        report_before, start_s = ask_report(self._folder, self.pid, REPORT_S), time.perf_counter()
        sample = self._ask(test, self._n_samples)
        elapsed_s, report_after = time.perf_counter() - start_s, ask_report(self._folder, self.pid, REPORT_S)
        return sample.beside(
            punctuality(report_before, report_after, elapsed_s) if report_before and report_after else None
        )

    def _ask(self, test: BenchTest, seed: int) -> Sample:
        """Send n_parallel prompts at once, and return the mean times of the requests. The first token of an answer
        comes with its prompt. Raises DeviceError."""
        bodies = [
            {"prompt": prompt, "n_predict": test.n_gen + 1, "cache_prompt": False, "ignore_eos": True,
             "temperature": 0, "samplers": ["temperature"], "seed": seed}
            for prompt in self._prompts(max(1, test.n_prompt))
        ]  # fmt: skip
        with ThreadPoolExecutor(len(bodies)) as pool:
            timings = list(pool.map(self._timings, bodies))
        prompt_s = mean(1e-3 * timing["prompt_ms"] for timing in timings)
        token_s = mean(1e-3 * timing["predicted_ms"] / max(1, timing["predicted_n"] - 1) for timing in timings)
        n_drafts = sum(timing.get("draft_n", 0) for timing in timings)
        n_accepted = sum(timing.get("draft_n_accepted", 0) for timing in timings)
        return Sample(
            prompt_s if test.n_prompt else 0.0,
            test.n_gen * token_s,
            accepted_share=n_accepted / n_drafts if n_drafts else None,
        )

    def _prompts(self, n_prompt: int) -> list[list[int]]:
        rng = random.Random(0)
        n_vocab = self._placer.model.n_vocab
        return [[rng.randrange(3, n_vocab) for _ in range(n_prompt)] for _ in range(self._n_parallel)]

    def _timings(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            timings: Mapping[str, Any] = self._client.ask("/completion", body)["timings"]
        except (RequestRefused, ServerGone, KeyError) as error:
            raise DeviceError(f"llama-server of arm {self.spec.name} does not answer: {error}") from None
        return timings

    def _left_s(self, most_s: float) -> float:
        return most_s if self._deadline is None else min(most_s, self._deadline.left_s)


def _drawn(draft: Draft | None, accepted: tuple[float, ...]) -> tuple[str, ...]:
    """Options for acceptance that is drawn, as many rates as drafts."""
    if draft is None or not accepted:
        return ()
    return SYNTHETIC_RATES, ",".join(map(str, accepted[: draft.n_draft]))
