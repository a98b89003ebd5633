"""One model on one device of this machine: what the device is, what was measured, and what runs added to that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from oallama.core.history import History, SeenPasses
from oallama.core.options import Options
from oallama.core.profile import Profile
from oallama.core.routing import Routing
from oallama.core.types import ModelInfo, Operator
from oallama.device.identity import KnownDevice, known_device
from oallama.device.spec import DeviceSpec, parse_device
from oallama.profile.emulate import resolved, this_host
from oallama.profile.history import adopted, corrected, rates_text, with_seen
from oallama.profile.progress import Progress
from oallama.profile.threads import usual_threads


class Measured:
    """Measuring is put off until something needs it."""

    def __init__(
        self, model: ModelInfo, operators: Sequence[Operator], options: Options, profile: Profile | None = None
    ) -> None:
        self.model = model
        self.operators = tuple(operators)
        self.options = options if options.n_ctx != 0 else replace(options, n_ctx=model.n_ctx_train or None)
        self.device, self._threads = resolved(parse_device(options.device), options.threads)
        self.attention = options.attention()  # with the KV cache that is measured and planned for
        self._profile = profile
        self._measured: Profile | None = None  # before it was corrected; None of one that was given

    @cached_property
    def threads(self) -> int:
        """Number of CPU threads: as asked for, else one for each physical core. Where cores have several speeds it is
        the number that decodes fastest, measured at the first call and kept."""
        if self.options.threads is not None or self.device.is_emulated:
            return self._threads
        return usual_threads(partial(this_host, say=Progress(True).say))

    @property
    def has_device(self) -> bool:
        """Whether there is a device to place on. Raises as found_device."""
        return not self.found_device.is_none

    @property
    def found_device(self) -> DeviceSpec:
        """The device that was asked for; of `auto`, the one that there is. Raises DeviceError and BridgeError, as
        `auto` looks for one."""
        return self.known_device.spec if self.device.kind == "auto" else self.device

    @cached_property
    def known_device(self) -> KnownDevice:
        """What the device is, asked once. Raises DeviceError, BridgeError."""
        return known_device(self.device)

    @property
    def machine(self) -> dict[str, Any]:
        """The fingerprint of this machine with the device: what is measured here belongs to it. Raises as above."""
        from oallama.profile.profiler import machine_with

        return machine_with(self.known_device, self.threads)

    @property
    def machine_key(self) -> str:
        """Key under which profiles and histories of this machine with the device are kept. Raises as above."""
        from oallama.profile.machine import fingerprint_key

        return fingerprint_key(self.machine)

    @cached_property
    def routing(self) -> Routing | None:
        """What is known of which experts are used; None where nothing is."""
        from oallama.profile.routing_store import read_routing

        model = self.model
        return read_routing(model.fingerprint, model.n_expert, model.n_expert_used) if model.n_expert else None

    def profile(self, progress: bool = True, refresh: bool = False, tokens: Sequence[int] = (1, 32, 512)) -> Profile:
        """The timings of this model's mul-mats on this machine, from the cache where it has them.

        Raises ProfileError, DeviceError.
        """
        if self._profile is None or refresh:
            from oallama.profile.profiler import profile_model

            measured = profile_model(
                self.model,
                self.operators,
                self.known_device,
                self.threads,
                tuple(tokens),
                refresh,
                progress,
                kv=self.attention,
            )
            self._measured, self._profile = measured, corrected(measured, self._history(measured))
        return self._profile

    @property
    def known_profile(self) -> Profile | None:
        """The profile where nothing has to be measured for it, else None. Raises DeviceError, BridgeError."""
        if self._profile is None:
            from oallama.profile.profiler import stored_profile

            device, threads = self.known_device, self.threads
            stored = stored_profile(self.model, self.operators, device, threads, kv=self.attention)
            self._measured = stored
            self._profile = None if stored is None else corrected(stored, self._history(stored))
        return self._profile

    def keep_seen(self, seen: Sequence[SeenPasses]) -> None:
        """Add what runs took to the history of this model and machine, from which adopt_history corrects the profile.
        Raises ProfileError where the cache cannot be written."""
        from oallama.profile.history_store import write_history

        if seen and self._measured is not None:
            write_history(with_seen(self._history(self._measured), seen), self.machine_key)

    @property
    def keeps_history(self) -> bool:
        """False where the profile came from a file, nothing was measured, or the device is emulated."""
        return not self.device.is_emulated and self.known_profile is not None and self._measured is not None

    def adopt_history(self) -> str:
        """Correct the profile by what runs took, from here on; returns in words by how much, "" where it stays. Raises
        ProfileError."""
        if not self.keeps_history or self._measured is None:
            return ""
        from oallama.profile.history_store import write_history

        before = self._history(self._measured)
        after = adopted(before)
        if after == before:
            return ""
        write_history(after, self.machine_key)
        self._profile = corrected(self._measured, after)
        return rates_text(after)

    def _history(self, measured: Profile) -> History:
        """History of runs under this profile."""
        from oallama.profile.history_store import read_history, timings_of

        return read_history(self.model.fingerprint, self.machine_key, timings_of(measured))
