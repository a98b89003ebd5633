"""Runs llama-server under supervision together with the placement page, and ends both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from oallama.core.temporary import parent_for_server, temporary_folder
from oallama.device.interrupt import held_interrupt
from oallama.report.placement_page import Served, page_policy, placement_document, placement_html
from oallama.run.address import Address
from oallama.run.plugin_report import PluginReport, ask_report, reports_in, runs_of
from oallama.run.process import Launch
from oallama.serve.live import live_of
from oallama.serve.placement_server import placement_server
from oallama.serve.supervisor import Supervisor

Reports = Sequence[PluginReport]

FOLDER = "oallama-serve-"
ANSWER_S = 2.0  # seconds that llama-server may take to answer


@dataclass(frozen=True, slots=True)
class Placements:
    """The placements to serve. wanted: the requested one; fallback: the one after the loss of the device, on the CPU,
    or on the local devices if `wanted` also has an RPC server; None without a device.

    launch: how to start each, with a folder for its files. device_gone: as in Supervisor. keep: gets at the end the
    plugin's reports of each start of `wanted` and of `fallback`.
    """

    wanted: Served
    fallback: Served | None
    launch: Callable[[Served, Path], Launch]
    keep: Callable[[Reports, Reports], None]
    device_gone: Callable[[], str | None]


def serve(
    address: Address,
    placements: Placements,
    log: Callable[[str], None],
    server_log: Callable[[bytes], None],
    placement_port: int,
) -> None:
    """Serve until interrupted; raises KeyboardInterrupt when all has ended.

    log: gets sentences for people; server_log: gets llama-server's output. placement_port 0: any free port.

    Raises DeviceError if llama-server does not start, fails to restart too often, or has no folder for its files.
    """
    with temporary_folder(FOLDER, parent_for_server()) as folder:
        wanted, fallback = placements.wanted, placements.fallback
        of_wanted, of_cpu = folder / "wanted", folder / "cpu"
        of_wanted.mkdir()
        of_cpu.mkdir()
        supervisor = Supervisor(
            placements.launch(wanted, of_wanted),
            None if fallback is None else placements.launch(fallback, of_cpu),
            partial(address.is_healthy, timeout_s=ANSWER_S),
            log=log,
            server_log=server_log,
            instead="the CPU" if fallback is None or fallback.plan.device == "none" else fallback.plan.device,
            device_gone=placements.device_gone,
        )
        shown = _Shown(supervisor, (wanted, of_wanted), (fallback or wanted, of_cpu), address)
        with held_interrupt(supervisor.stop), placement_server(shown.document, shown.page, placement_port) as url:

            def ready() -> None:
                report = ask_report(shown.now[1], supervisor.state.pid or 0, ANSWER_S)
                for problem in () if report is None else report.problems:
                    log(f"warning: {problem}")
                log(f"oallama: serving at {address.url}/v1, placement at {url}; Ctrl-C ends it")

            supervisor.on_ready = ready
            try:
                supervisor.run()
            finally:
                placements.keep(list(reports_in(of_wanted)), list(reports_in(of_cpu)))


class _Shown:
    """Renders the placement page of the placement in use: the wanted one, or the one on the CPU after the loss of the
    device. wanted, fallback: each with the folder of the plugin's reports."""

    def __init__(
        self, supervisor: Supervisor, wanted: tuple[Served, Path], fallback: tuple[Served, Path], address: Address
    ) -> None:
        self._supervisor, self._wanted, self._on_cpu, self._address = supervisor, wanted, fallback, address

    @property
    def now(self) -> tuple[Served, Path]:
        return self._on_cpu if self._supervisor.state.device_lost else self._wanted

    def document(self) -> dict[str, Any]:
        """Return the answer to `GET /placement`."""
        state, (served, folder) = asdict(self._supervisor.state), self.now
        text = self._address.metrics(state["pid"], ANSWER_S) if state["status"] == "ready" else None
        live = None if text is None else live_of(text)
        reports = list(reports_in(folder))
        running = next((report for report in reports if report.pid == state["pid"]), None)
        runs = runs_of(block for report in reports for block in report.blocks)
        return placement_document(served, state, live, runs, None if running is None else back_end(running))

    def page(self) -> tuple[str, str]:
        """Return the page and its Content-Security-Policy."""
        return placement_html(self.now[0]), page_policy()


def back_end(report: PluginReport) -> dict[str, Any]:
    """Return the plugin's part of /placement, without the times of its blocks."""
    document = asdict(report)
    return {key: document[key] for key in ("usable", "problems", "memory", "stats", "emulated")}
