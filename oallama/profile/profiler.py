"""The profile of a model on this machine: from the cache, or measured in a child process and cached."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from oallama.core.codec import to_json
from oallama.core.errors import DeviceError, OallamaError, ProfileError, UsageError
from oallama.core.options import DEFAULT_ATTENTION
from oallama.core.profile import Profile
from oallama.core.types import CPU_DEVICE, PLAIN_LAYOUT, Attention, ModelInfo, Operator
from oallama.device.child import child_errors
from oallama.device.identity import KnownDevice, known_device
from oallama.device.spec import DeviceSpec
from oallama.profile import store
from oallama.profile.busy import busy_percent, others_percent, was_busy
from oallama.profile.child import MODULE, Message, ProfileRequest
from oallama.profile.machine import fingerprint, power_changes
from oallama.profile.merge import empty, is_complete, merged, select
from oallama.profile.progress import Progress
from oallama.profile.timing import TimingPolicy
from oallama.profile.wanted import Wanted, cases_at, kernel_kind, wanted

DEFAULT_TOKENS = (1, 32, 512)
POLICY = TimingPolicy(target=0.02, min_repeats=5, max_repeats=100, warmup_runs=1, time_cap_s=0.2)


def profile_model(
    model: ModelInfo,
    operators: Sequence[Operator],
    device: KnownDevice | DeviceSpec | str | None,
    n_threads: int,
    tokens: Sequence[int] = DEFAULT_TOKENS,
    refresh: bool = False,
    progress: bool = True,
    policy: TimingPolicy = POLICY,
    kv: Attention = DEFAULT_ATTENTION,
) -> Profile:
    """The profile of a model's operators on this machine and on the device.

    Each distinct (type, shape, batch size of `tokens`) is timed in every CPU layout, with n_threads threads, and on the
    device; also a layer's non-matmul work, with and without flash attention, for a KV cache of kv's types; and the
    link. Cached cases are not measured again, except with refresh. An interrupted measurement continues where it
    stopped; an interrupted refresh leaves the cache as it was. Cases measured while other programs used the CPU are
    used only while some do, then measured again. If the cache cannot be written, a note says so and the profile is used
    for this call alone. progress: a bar and notes on stderr.

    Raises UsageError (tokens, n_threads; as busy_percent), ProfileError (cannot be measured), DeviceError (unknown or
    lost), BridgeError.
    """
    if not tokens or min(tokens) < 1:
        raise UsageError("--tokens needs batch sizes of at least 1, e.g. 1,32,512")
    if n_threads < 1:
        raise UsageError("--threads must be at least 1")
    if not operators:
        raise ProfileError(f"{model.path} has no mul-mat weights to measure")
    busy_percent()  # raises before anything is measured
    known_as = known_device(device)
    machine = machine_with(known_as, n_threads)
    want = wanted(model, operators, tokens, machine["llc_bytes"], kv)
    path = store.profile_path(machine)

    with Progress(progress) as shown:
        profile = None if refresh else _serving(path, want, shown.say)
        if profile is None:
            waits = "another process is profiling this machine; waiting until it ends"
            with store.measuring_lock(path.parent, lambda: shown.say(waits)):
                profile = None if refresh else _serving(path, want, shown.say)
                if profile is None:
                    stored = [] if refresh else _usable(path, lambda _: None)
                    *_, known = (empty(machine), *stored)
                    request = ProfileRequest(str(known_as.spec.timed), n_threads, want, known, policy)
                    profile = _Measurement(request, path, refresh, shown).run()
    part = select(profile, want)
    return replace(part, warnings=part.warnings + tuple(power_changes(profile.fingerprint, machine)))


def machine_with(device: KnownDevice, n_threads: int) -> dict[str, Any]:
    """The fingerprint of a profile of the device on this machine."""
    return fingerprint(n_threads, str(device.spec.measured), identity=device.identity)


def stored_profile(
    model: ModelInfo,
    operators: Sequence[Operator],
    device: KnownDevice | DeviceSpec,
    n_threads: int,
    kv: Attention = DEFAULT_ATTENTION,
) -> Profile | None:
    """Return the cached profile of this model, even if it was made on a busy machine (profile/busy.py: `doubt` says
    so); None without any. Raises as known_device does."""
    machine = machine_with(known_device(device), n_threads)
    want, path = wanted(model, operators, DEFAULT_TOKENS, machine["llc_bytes"], kv), store.profile_path(machine)
    profiles = (store.load(at, lambda _: None) for at in (path, store.busy_path(path)))
    return next(
        (select(profile, want) for profile in profiles if profile is not None and is_complete(profile, want)), None
    )


def _serving(path: Path, want: Wanted, warn: Callable[[str], None]) -> Profile | None:
    """The stored profile with everything for the model."""
    return next((profile for profile in _usable(path, warn) if is_complete(profile, want)), None)


def _usable(path: Path, warn: Callable[[str], None]) -> Iterator[Profile]:
    """The stored profiles: that of a quiet machine, then that of a busy one while it is still busy."""
    profile = store.load(path, warn)
    if profile is not None:
        yield profile
    disturbed = store.load(store.busy_path(path), warn)
    if disturbed is not None and others_percent() > busy_percent():
        yield disturbed


@dataclass(slots=True)
class _Measurement:
    """One measurement: starts children until one of them reaches the end. If it is interrupted or fails, what was
    measured until then is saved, so that a later one continues; but a part never replaces a profile that it does not
    extend."""

    request: ProfileRequest
    path: Path  # of the profile of a quiet machine
    refresh: bool
    shown: Progress
    _fragments: list[Message] = field(default_factory=list)
    _task: Message | None = None  # what the child is doing
    _crashed: set[tuple[str, Any]] = field(default_factory=set)  # (layout, kind of kernel)

    def run(self) -> Profile:
        """Measure all that is missing. A CPU layout that crashes is skipped with a warning (see _left_out); any other
        crash is a ProfileError, or a DeviceError if the device was at work."""
        from ggml_bridge import ChildDied
        from ggml_bridge.child import run_in_child

        while True:
            self._task = None
            request = replace(self.request, profile=self._measured)
            with child_errors(ProfileError, ProfileError):
                try:
                    run_in_child(MODULE, to_json(request), self._on_progress)
                    break
                except ChildDied as died:
                    crash = self._left_out(died)
                    if crash is None:
                        raise self._blame(died, self._save(is_part=True)) from None
                    self._fragments.append(crash)
                except KeyboardInterrupt:
                    kept = "; finished measurements are kept, and the same command continues"
                    self.shown.say(f"interrupted{kept if self._save(is_part=True) else ''}")
                    raise
                except Exception:
                    self._save(is_part=True)
                    raise
        self._save()
        return self._measured

    @property
    def _measured(self) -> Profile:
        """All measurements so far."""
        return merged(self.request.profile, self._fragments)

    def _save(self, is_part: bool = False) -> bool:
        """Save all measurements so far; whether they are saved. Those beside other programs are saved in a separate
        file, which replaces an earlier profile only after a refresh. is_part: the measurement did not reach its end."""
        profile, busy = self._measured, store.busy_path(self.path)
        path, other = (busy, self.path) if was_busy(profile) else (self.path, busy)
        if is_part and store.load(path, lambda _: None) not in (None, self.request.profile):
            return False
        try:
            store.write_in_cache(path, profile)
            if not is_part and (self.refresh or other == busy):
                other.unlink(missing_ok=True)
        except ProfileError as fault:
            self.shown.say(f"note: {fault}; this run's measurements are not kept")
            return False
        return True

    def _on_progress(self, message: Message) -> None:
        if "weight" in message:
            self.shown.expect(message["weight"])
        if "start" in message:
            self._task = message
            self.shown.start(message["start"])
        if message.get("fragment"):
            self._fragments.append(message["fragment"])
        if "done" in message:
            self._task = None
            self.shown.finish(message["done"])

    def _left_out(self, died: Exception) -> Message | None:
        """The fragment that makes the next child skip what crashed, if the model does not need it: a CPU layout other
        than the plain one, or only its kernels for 3-D or routed weights. None: it is needed, or skipping did not
        help."""
        task, broken = self._task or {}, self._measured.broken_layouts
        layout, kernel = str(task.get("layout")), task.get("kind")
        again = (layout, kernel) in self._crashed
        self._crashed.add((layout, kernel))
        if again or task.get("device") != CPU_DEVICE or layout in (PLAIN_LAYOUT, *broken):
            return None
        what = f"crashed while measuring {task['start']} ({died})"
        remedy = "run `oallama setup --refresh`"
        if kernel == "MUL_MAT":
            warning = f"the CPU layout {layout} {what} and is left out; {remedy}"
            return {"fingerprint": {"broken_layouts": [*broken, layout]}, "warnings": [warning]}
        cases = [c for c in cases_at(self.request.want, CPU_DEVICE, layout) if kernel_kind(c.mul_mat) == kernel]
        warning = f"{kernel} in the CPU layout {layout} {what} and is left out; {remedy}"
        return {
            "skipped": [to_json(case.skipped(f"{kernel} crashes in this layout")) for case in cases],
            "warnings": [warning],
        }

    def _blame(self, died: Exception, is_kept: bool) -> OallamaError:
        """The error for a crash, by its cause. is_kept: whether finished measurements are saved."""
        spec, task = self.request.device_spec, self._task
        if task is None:
            what = f"the measuring process died at its start ({died})"
            remedy = "check the device and the installation with `oallama doctor`"
            return ProfileError(f"{what}; {remedy}") if spec == "none" else DeviceError(f"{spec}: {what}; {remedy}")
        again = "run the same command again"
        kept = f"finished measurements are kept; {again} to continue" if is_kept else again
        if task["device"] != CPU_DEVICE:
            return DeviceError(f"the device {spec} was lost while measuring {task['start']} ({died}); {kept}")
        return ProfileError(f"measuring {task['start']} ended the process ({died}); {kept}, or run `oallama doctor`")
