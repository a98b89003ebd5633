"""What llama.cpp does with a layer that it keeps on the host when a batch is large enough to be offloaded.

Its plain weights are streamed to the device one by one (operators.py). The nodes between its mul-mats have no weights,
and ggml's scheduler gives those to the device of their neighbours: norms, attention and the rest run there too. Only
the KV write stays, because the layer's cache is in host memory: new keys and values come back, and attention has the
whole cache copied to the device, in every micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oallama.core.ggml_types import bytes_per_element
from oallama.core.profile import LinearFit, Profile, RestShape
from oallama.core.types import CPU_DEVICE, PLAIN_LAYOUT, Operator
from oallama.cost.graph import computes_outputs_only
from oallama.cost.operators import OFFLOAD_MIN_TOKENS, OperatorCost
from oallama.cost.passes import Pass
from oallama.cost.rest import RestIndex, rest_of, rest_seconds
from oallama.cost.transfer import transfer_rates, weight_stream

KEYS_AND_VALUES = 2


@dataclass(frozen=True, slots=True)
class HostCache:
    """The KV cache of one layer in host memory, and the link that attention on the device reaches it over."""

    upload: LinearFit
    download: LinearFit
    bytes_per_position: float

    def upload_seconds(self, n_kv: int) -> float:
        """Of one layer's cache to the device."""
        return KEYS_AND_VALUES * self.upload.alpha_s + n_kv * self.bytes_per_position * self.upload.beta_s_per_byte

    def seconds(self, n_tokens: int, n_kv: int) -> float:
        """Of one layer in one pass: the cache to the device, new positions back."""
        to_device = self.upload_seconds(n_kv)
        back = KEYS_AND_VALUES * self.download.alpha_s
        return to_device + back + n_tokens * self.bytes_per_position * self.download.beta_s_per_byte


def host_cache(profile: Profile) -> HostCache | None:
    """None where the device takes no work from the host, or the profile does not say how large the cache is."""
    shape = next((case.shape for case in profile.rest if case.shape is not None), None)
    stream = weight_stream(profile)
    if stream is None or shape is None:
        return None
    return HostCache(stream, transfer_rates(profile).copy_out, cache_bytes(shape))


def cache_bytes(shape: RestShape) -> float:
    """Of one position of the KV cache in one layer."""
    keys = shape.n_embd_head_k * bytes_per_element(shape.type_k)
    values = shape.n_embd_head_v * bytes_per_element(shape.type_v)
    return shape.n_head_kv * (keys + values)


def takes_attention(operators: Sequence[Operator], costs: Sequence[OperatorCost]) -> bool:
    """Whether the mul-mats around attention are offloaded, and so take it along: where the host keeps them plain."""
    around = [c for o, c in zip(operators, costs, strict=True) if o.role.startswith("attn_")]
    return bool(around) and all(c.layout == PLAIN_LAYOUT and c.t_gpu_s is not None for c in around)


def offloaded(operators: Sequence[Operator], costs: Sequence[OperatorCost], n_run: int) -> tuple[bool, ...]:
    """Which operators llama.cpp computes on the device in a large batch though the host has them. What sees only the
    tokens whose logits are wanted never has a large batch."""
    return tuple(
        c.layout == PLAIN_LAYOUT and c.t_gpu_s is not None and not computes_outputs_only(o, n_run)
        for o, c in zip(operators, costs, strict=True)
    )


def rest_with_offload(
    index: RestIndex, device: str, passes: Sequence[Pass], cache: HostCache | None
) -> tuple[float, float]:
    """(host's, device's) seconds of one layer's other nodes; cache: None where nothing is offloaded."""
    on_cpu, on_device = rest_of(index, device, passes)
    if cache is None or device not in index:
        return on_cpu, on_device
    large = [p for p in passes if p.n_tokens >= OFFLOAD_MIN_TOKENS]
    small = [p for p in passes if p.n_tokens < OFFLOAD_MIN_TOKENS]
    copies = sum(p.count * cache.seconds(p.n_tokens, p.n_kv) for p in large)
    return rest_seconds(index, CPU_DEVICE, small) + rest_seconds(index, device, large) + copies, on_device
