"""The picture of `oallama profile --routing --chart`: bars of what the most used experts serve."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from oallama.report.chart import BAR, BAR_STEP, GREY, LINE_GAP, MARGIN, NAMES, OURS, STOCK, WIDTH, Bar, Picture, Text
from oallama.report.routing import PHASES, SHARE_NAMES, RoutingReport

TOP, GAP = 110, 40
LEFT = MARGIN + NAMES
LONGEST = WIDTH - LEFT - MARGIN - 60  # of all traffic
EVEN = "#d5dbe1"


@dataclass(frozen=True, slots=True)
class RoutingChart(Picture):
    """name: of the model. label: what the chart shows, for those who do not see it."""

    name: str
    report: RoutingReport
    label: str

    @property
    def height(self) -> int:
        n_phases = sum(self.report.phase(phase) is not None for phase in PHASES)
        return TOP + n_phases * (len(SHARE_NAMES) * (3 * BAR_STEP + LINE_GAP) + GAP)

    def shapes(self) -> Iterator[Bar | Text]:
        report = self.report
        yield Text(MARGIN, 32, f"What the most used experts serve: {self.name}", 18)
        experts = f"{report.n_expert} experts, {report.n_expert_used} a token; median of the layers"
        yield Text(MARGIN, 52, experts, 12, GREY)
        meanings = ((OURS, "on the same traffic"), (STOCK, "on later traffic"), (EVEN, "were all used alike"))
        for index, (colour, meaning) in enumerate(meanings):
            x = MARGIN + 180 * index
            yield from (Bar(x, 64, 12, 12, colour), Text(x + 18, 75, meaning, 12))
        y = TOP
        for phase in PHASES:
            figures = report.phase(phase)
            if figures is None:
                continue
            yield Text(MARGIN, y - 6, phase, colour=GREY)
            later = figures.held_out or (None,) * len(report.shares)
            for name, *values in zip(SHARE_NAMES, figures.coverage, later, report.shares, strict=True):
                yield Text(LEFT - 12, y + 2 * BAR_STEP - 4, f"{name} of the experts", 12, ends_at_x=True)
                for value, colour in zip(values, (OURS, STOCK, EVEN), strict=True):
                    if value is not None:
                        yield Bar(LEFT, y, max(1.0, value * LONGEST), BAR, colour)
                        yield Text(LEFT + value * LONGEST + 6, y + BAR - 3, f"{value:.0%}", 12)
                    y += BAR_STEP
                y += LINE_GAP
            y += GAP


def routing_chart(name: str, report: RoutingReport) -> RoutingChart:
    return RoutingChart(name, report, f"Share of the traffic of {name} that its most used experts serve")
