"""Correction of a profile by measured runs (TwinPilots' tracker, section 3), and the history's cache file.

The time of CC gives the CPU's rate. If the thread waited for the device, the whole time gives the rate of the device's
side: of its copies of weights or of its kernels, whichever were predicted to take longer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from oallama.core.files import cache_folder
from oallama.core.history import History, Rates, SeenPasses
from oallama.core.profile import LinearFit, Profile, ProfileCase
from oallama.core.types import CPU_DEVICE
from oallama.profile.store import read_in_cache, write_in_cache

MEMORY_PASSES = 1024
"""Weight limit of older passes."""

ENOUGH_PASSES = {True: 32, False: 4}
"""Fewest passes that give a rate, by whether they are of single tokens; the first ones include preparation."""

WAITED = 0.05
"""Least share of waiting in a pass from which the device's speed is derived."""

FASTEST, SLOWEST = 1 / 8, 8.0  # rates that are believed

MOST = 1e6
"""The largest rate of a history; 1 / MOST is the smallest."""

CHANGE = 0.05
"""Share by which a rate must change before a profile is corrected again."""


def with_seen(history: History, seen: Sequence[SeenPasses]) -> History:
    """The history with these passes added."""
    passes_by_batch = {passes.batch: passes for passes in history.seen}
    for new in seen:
        passes_by_batch[new.batch] = _mean(passes_by_batch[new.batch], new) if new.batch in passes_by_batch else new
    return replace(history, seen=tuple(passes_by_batch[batch] for batch in sorted(passes_by_batch)))


def _mean(old: SeenPasses, new: SeenPasses) -> SeenPasses:
    n_old, n_new = min(old.n_passes, MEMORY_PASSES), new.n_passes
    share = n_new / (n_old + n_new)

    names = "cpu_s", "wait_s", "other_s", "predicted_cpu_s", "predicted_device_s", "predicted_between_s"
    pairs = {name: (getattr(old, name), getattr(new, name)) for name in names}
    means = {name: earlier + share * (later - earlier) for name, (earlier, later) in pairs.items()}
    return replace(new, n_passes=n_old + n_new, **means)


def adopted(history: History) -> History:
    """The history with rates from its passes, which are then dropped. Unchanged if all rates stay within CHANGE."""
    decode, link = _rates([passes for passes in history.seen if passes.batch == 1], single=True)
    prompt, prompt_link = _rates([passes for passes in history.seen if passes.batch > 1], single=False)
    link = link or prompt_link or 1.0
    if all(abs(rate - 1) <= CHANGE for rate in (decode.cpu, decode.device, prompt.cpu, prompt.device, link)):
        return history
    return replace(
        history,
        decode=_times(history.decode, decode),
        prompt=_times(history.prompt, prompt),
        link=_bounded(history.link * link),
        seen=(),
    )


def corrected(profile: Profile, history: History) -> Profile:
    """The profile with times multiplied by the history's rates: mul-mats of CPU and device, separately for single
    tokens and larger batches, and copies to the device."""
    if history.changes_nothing:
        return profile

    def case(row: ProfileCase) -> ProfileCase:
        rates = history.decode if row.n_tokens == 1 else history.prompt
        rate = rates.cpu if row.device == CPU_DEVICE else rates.device
        return replace(row, seconds=row.seconds * rate, samples=tuple(sample * rate for sample in row.samples))

    def fit(line: LinearFit) -> LinearFit:
        points = tuple((n_bytes, seconds * history.link) for n_bytes, seconds in line.points)
        return replace(line, alpha_s=line.alpha_s * history.link, beta_s_per_byte=line.beta_s_per_byte * history.link,
                       points=points)  # fmt: skip

    link = {name: fit(line) if name.startswith("h2d") else line for name, line in profile.link.items()}
    note = f"times are corrected by earlier runs: {rates_text(history)}; --refresh measures again"
    return replace(profile, cases=tuple(map(case, profile.cases)), link=link, warnings=(*profile.warnings, note))


def rates_text(history: History) -> str:
    """A sentence with the correction of each side, for single tokens and prompts."""
    decode, prompt = history.decode, history.prompt
    return (
        f"CPU {decode.cpu:.2f} and {prompt.cpu:.2f}, device {decode.device:.2f} and {prompt.device:.2f}, "
        f"link {history.link:.2f} times as long (tokens, prompts)"
    )


def _rates(seen: Sequence[SeenPasses], single: bool) -> tuple[Rates, float | None]:
    """(rates of CPU and device, that of the link; None: not known)."""
    if sum(passes.n_passes for passes in seen) < ENOUGH_PASSES[single]:
        return Rates(), None

    def total(name: str) -> float:
        return float(sum(passes.n_passes * getattr(passes, name) for passes in seen))

    cpu = _believed(total("cpu_s"), total("predicted_cpu_s"))
    if total("wait_s") <= WAITED * total("total_s"):
        return Rates(cpu), None
    device = _believed(total("total_s") + total("predicted_between_s"), total("predicted_device_s"))
    return (Rates(cpu), device) if seen[-1].copies_last else (Rates(cpu, device), None)


def _believed(seen_s: float, predicted_s: float) -> float:
    return min(SLOWEST, max(FASTEST, seen_s / predicted_s)) if seen_s > 0 and predicted_s > 0 else 1.0


def _times(rates: Rates, other: Rates) -> Rates:
    return Rates(_bounded(rates.cpu * other.cpu), _bounded(rates.device * other.device))


def _bounded(rate: float) -> float:
    return min(MOST, max(1 / MOST, rate))


#
# the cache
#


VERSION = 1


def history_path(model_fingerprint: str, machine: str) -> Path:
    """The file for a model; machine: the key of the profile's fingerprint."""
    return cache_folder() / f"history-v{VERSION}-{machine}-{model_fingerprint[:16]}.json"


def timings_of(profile: Profile) -> str:
    """A digest (16 hex digits) of the timings that a history corrects; it changes if they are measured again."""
    cases = [(str(case.key), case.seconds) for case in profile.cases]
    link = [(name, fit.alpha_s, fit.beta_s_per_byte) for name, fit in sorted(profile.link.items())]
    return hashlib.sha256(repr((cases, link)).encode()).hexdigest()[:16]


def read_history(model_fingerprint: str, machine: str, timings: str) -> History:
    """Read the history of a profile with these timings; an empty one if it is missing or unusable."""
    nothing = History(VERSION, model_fingerprint, timings)
    history = read_in_cache(History, history_path(model_fingerprint, machine)) or nothing
    identity = (history.version, history.model_fingerprint, history.profile)
    rates = (history.decode.cpu, history.decode.device, history.prompt.cpu, history.prompt.device, history.link)
    sound = identity == (VERSION, model_fingerprint, timings) and all(rate == _bounded(rate) for rate in rates)
    return history if sound else nothing


def write_history(history: History, machine: str) -> None:
    """Save it atomically. Raises ProfileError if the cache cannot be written."""
    write_in_cache(history_path(history.model_fingerprint, machine), history)
