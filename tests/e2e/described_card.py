"""Profiles that are described, not measured, so that plans do not depend on how busy this machine is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from oallama.core.codec import to_json
from oallama.core.profile import Profile
from oallama.device.card import Card, Host
from oallama.placer import Placer
from oallama.profile.described import described


def slow_cpu_fast_card(model: Path, link_bytes_per_s: float) -> Profile:
    """A slow CPU beside a fast card on this link."""
    return beside_fast_card(Placer.load(model, device="none"), link_bytes_per_s)


def beside_fast_card(placer: Placer, link_bytes_per_s: float) -> Profile:
    """Return the profile that slow_cpu_fast_card makes, of a placer's operators."""
    card = Card("test", "a card", 1 << 30, 2e11, 1e13, 5e12, 1e-7, 5e-7, 1e-8, 5e-7, 1e-7, 1e-7,
                link_bytes_per_s, link_bytes_per_s / 2)  # fmt: skip
    host = Host("a slow CPU", bytes_per_s=2e8, flops_per_s=5e8, source="this test")
    made = described(host, card, placer.model, placer.operators, (1, 32, 512))
    return replace(made, fingerprint={**made.fingerprint, "device_backend": "Emulated"})  # on which they run


def slow_cpu_worker(model: Path) -> Profile:
    """As slow_cpu_fast_card, of a worker process, which has no pinned memory."""
    made = slow_cpu_fast_card(model, 1e9)
    return replace(made, fingerprint={**made.fingerprint, "device_host_buffer": False})


def profile_file(profile: Profile, folder: Path) -> Path:
    """A file of it for --profile."""
    file = folder / "profile.json"
    file.write_text(json.dumps(to_json(profile)), encoding="utf-8")
    return file
