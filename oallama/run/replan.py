"""Keeps the statistics of a model while it runs, and moves the cuts that were kept of it to where they are best."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oallama.cost.tracker import BlockKey, BlockSeconds, Sample, Tracker, size_class, total
from oallama.place.kept_cuts import Replan
from oallama.place.replan import Replanner

if TYPE_CHECKING:
    from ggml_bridge import BlockTimes, SplitPlan

TOKENS_BETWEEN = 16
"""After so many tokens the times of their blocks are looked at."""

TOKENS_SETTLED = 32
"""After a change so many tokens pass until means say what it brought."""


class RunningReplan:
    """For one engine. `beat` is called after each decode, where it may talk to the split back end."""

    def __init__(self, split: SplitPlan, replan: Replan) -> None:
        self._split, self._rule, self._tracker = split, Replanner(replan), Tracker()
        self._choice = self._rule.start()
        self._blocks = {name: i for i, kept in enumerate(replan.blocks) for name in kept.operators}
        self._names: dict[str, None] = {}  # first weights of the sub-graphs that decode runs
        self._n_tokens = self._settles = 0
        self._drifts = False
        self.changes: list[str] = []
        """What was changed, a sentence each."""
        self._seed()

    @property
    def statistics(self) -> dict[BlockKey, BlockSeconds]:
        return self._tracker.means()

    def beat(self, depth: int) -> None:
        """One more decode has ended; depth: tokens in the KV cache."""
        self._n_tokens += 1
        if self._n_tokens % TOKENS_BETWEEN:
            return
        depth_class = size_class(depth)
        samples = [_sample(times, depth_class) for times in self._split.take_times()]
        self._tracker.feed(samples)
        self._names.update(dict.fromkeys(sample.key.block for sample in samples if sample.key.batch == 1))
        if self._n_tokens >= self._settles:
            self._revise(depth_class)

    def _revise(self, depth: int) -> None:
        known = [one for name in self._names if (one := self._seen(name, depth)) is not None]
        observed, before = total(known), self._choice
        after = self._rule.revised(before, observed)
        if before.before is None and not self._drifts:  # what has begun since the last look is seen in part only
            self._drifts = after != before
            return
        self._drifts = False
        if after == before:
            return
        self._choice = after
        moved = [i for i, (a, b) in enumerate(zip(before.cuts, after.cuts, strict=True)) if a != b]
        if not moved:
            return
        self._settles = self._n_tokens + TOKENS_SETTLED
        self._seed()
        for i in moved:
            kept = self._rule.replan.blocks[i]
            for name in kept.operators:
                self._split.move_cut(name, kept.cuts[after.cuts[i]].cc)
        if before.before is not None:
            self.changes.append(
                f"after {self._n_tokens} decodes the cuts were moved back: tokens did not become faster"
            )
            return
        rates = f"CPU {after.rates.cpu:.2f}, device {after.rates.device:.2f} times as long as was predicted"
        self.changes.append(
            f"after {self._n_tokens} decodes the cuts of {len(moved)} blocks were moved: "
            f"times were {self._rule.drift(before, observed):+.0%} off, {rates}"
        )

    def _seen(self, name: str, depth: int) -> BlockSeconds | None:
        """The mean of the sub-graph that begins with this weight, as its block is cut now."""
        i = self._blocks.get(name)
        if i is None:
            return None
        cut = self._rule.replan.blocks[i].cuts[self._choice.cuts[i]]
        return self._tracker.mean(BlockKey(name, cut.cc, 1, depth))

    def _seed(self) -> None:
        """With what is predicted of the cuts that are computed with. A lone mul-mat may be one of several in its
        sub-graph, of which nothing is known beforehand."""
        self._tracker.seed(
            {
                (name, kept.cuts[cut].cc, 1): self._rule.predicted(i, cut, self._choice.rates)
                for i, (kept, cut) in enumerate(zip(self._rule.replan.blocks, self._choice.cuts, strict=True))
                if len(kept.operators) > 1
                for name in kept.operators
            }
        )


def _sample(times: BlockTimes, depth: int) -> Sample:
    n = times.n_runs
    seconds = BlockSeconds(times.host_s / n, times.wait_s / n, (times.launch_s + times.join_s) / n)
    return Sample(BlockKey(times.name, times.cc, times.batch, depth), seconds, n)
