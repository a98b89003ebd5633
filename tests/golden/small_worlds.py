"""Plans of small models on described machines, as tests/golden/small_worlds.txt has them.

    PYTHONPATH=tests/unit:tests python tests/golden/small_worlds.py

writes them anew; `git diff` shows what has changed. Large models on recorded profiles: scripts/plan_corpus.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

from worlds import CARD, HOST, World, linked, long_prompt, model_info, routed, slow_cpu

from oallama.core.errors import OallamaError
from oallama.core.options import Options
from oallama.core.profile import Contention
from oallama.core.types import Workload
from oallama.planner.decide import larger_ubatches
from oallama.planner.policies.registry import Rules, policy_names

FILE = Path(__file__).with_suffix(".txt")
DENSE = tuple(name for name in policy_names() if name not in ("fiddler", "experts"))
STREAMED = Options(flash_attn="on", gpu_weights=0.0)
WIDE = model_info(n_embd=1024, n_ff=4096)
BLOCKING = (("device_asynchronous", False), ("device_backend", "RPC"))
SKEWED = (9000.0, 5.0, 5.0, 5000.0, 5.0, 5.0, 5.0, 5.0)
DEEP = Workload(n_prompt=1, n_gen=64, n_ctx=8192, n_past=7000)


def halved(first: str, second: str) -> Contention:
    """Two kinds of work of which each takes half of the other's rate."""
    return Contention(
        first=first, second=second, n_tokens=1, first_alone_gb_per_s=20.0, second_alone_gb_per_s=10.0,
        first_with_second_gb_per_s=10.0, second_with_first_gb_per_s=5.0,
    )  # fmt: skip


def prompt_of(n_prompt: int, n_gen: int = 1, n_past: int = 0) -> Workload:
    return Workload(n_prompt=n_prompt, n_gen=n_gen, n_ctx=2048, n_past=n_past)


def worlds() -> Iterator[tuple[str, World, tuple[str, ...]]]:
    """Name, world, and the policies by which it is planned."""
    yield "usual", World(), ("oato", "layers", "fit", "scheinfer")
    yield "slow CPU", slow_cpu(), DENSE
    yield "slow CPU, prompt", slow_cpu(workload=prompt_of(300, 50), host=HOST, repacked=1.5), DENSE
    slow_type = replace(HOST, flops_by_type=(("Q4_0", 1e11),), flops_attention_per_s=2e11)
    yield "slow type", World(host=slow_type, workload=prompt_of(300, 50)), ("layers", "scheinfer")
    yield "all fits", World(share=3.0), ("layers", "oato", "scheinfer", "fit", "twinpilots")
    yield (
        "uneven layers",
        World(model=model_info(n_layer=4), n_ffs=(1024, 2048, 1408, 512)),
        ("layers", "oato", "split"),
    )
    for n_prompt in (31, 32, 512):
        yield f"prompt of {n_prompt}", slow_cpu(share=0.3, workload=prompt_of(n_prompt)), ("layers", "cpu", "oato")
    yield "no prompt behind others", slow_cpu(workload=prompt_of(600, 0, 700)), ("layers", "cpu", "scheinfer")
    yield (
        "streamed",
        slow_cpu(model=WIDE, options=STREAMED, share=1.0),
        ("scheinfer", "hetegen", "flexgen", "twinpilots"),
    )
    yield (
        "many layers streamed",
        slow_cpu(model=replace(WIDE, n_layer=6), options=STREAMED, share=1.0),
        ("twinpilots", "flexgen"),
    )
    for rate in (1e7, 5e9, 40e9):
        some = Options(flash_attn="on", gpu_weights=0.2)
        yield (
            f"link of {rate / 1e9:g} GB/s",
            slow_cpu(card=linked(rate), options=some, share=1.0),
            ("scheinfer", "hetegen", "oato"),
        )
    for share in (0.1, 1.5):
        yield f"room for {share:g}", slow_cpu(share=share), ("hetegen", "flexgen", "atsinfer", "split")
    yield "long prompt", long_prompt(), ("scheinfer", "split", "hetegen", "layers")
    for room in (0, 1 << 40):
        world = long_prompt(repacked=1.2, host_copies_limit=room, card=linked(4e9))
        yield f"long prompt, repacked, host room {room >> 30}", world, ("scheinfer", "flexgen", "fit")
    yield (
        "blocking",
        slow_cpu(model=WIDE, options=STREAMED, share=1.0, device_facts=BLOCKING),
        ("scheinfer", "flexgen", "layers"),
    )
    yield (
        "pageable",
        slow_cpu(options=STREAMED, share=1.0, device_facts=(("device_pins", False),)),
        ("flexgen", "scheinfer"),
    )
    for pair in (("cpu", "link"), ("device", "link"), ("cpu", "device")):
        world = slow_cpu(model=WIDE, options=STREAMED, share=1.0).with_profile(sharing=(halved(*pair),), copy_wait=0.9)
        yield f"{' and '.join(pair)} at half rate", world, ("scheinfer", "flexgen")
    yield "F16, odd width", World(model=model_info(n_layer=1, n_ff=1408), type_name="F16"), ("split", "oato")

    yield "experts", slow_cpu(model=routed().model), ("fiddler", "twinpilots", "fit", "oato", "split")
    yield "skewed", routed(SKEWED), ("experts", "auto", "fiddler", "scheinfer")
    yield "skewed, biased", routed(SKEWED, biased=True, card=linked(1e9)), ("experts",)
    yield "skewed, others later", routed(SKEWED, latest=SKEWED[::-1]), ("experts",)
    yield "skewed, dear launches", routed(SKEWED, card=replace(slow_cpu().card, launch_s=1.0)), ("experts",)
    yield "skewed, short prompt", routed(SKEWED, workload=prompt_of(8, 400)), ("experts", "fiddler")
    yield "used alike", routed((100.0,) * 8), ("experts",)

    yield "deep", World(workload=DEEP, options=Options(), share=0.4), ("oato", "layers", "cpu", "fit")
    yield "between depths", World(workload=replace(DEEP, n_past=600)), ("layers", "cpu")
    yield "deep, quantised", World(workload=DEEP, options=Options(type_v="q8_0")), ("cpu", "layers")
    yield "no flash attention", World(workload=DEEP, options=Options(flash_attn="off")), ("split", "oato", "cpu")
    large = World(workload=replace(DEEP, n_ctx=65536), options=Options(), share=1.5)
    rest = [c if c.shape.flash_attn else replace(c, seconds=c.seconds / 100) for c in large.profile.rest]
    for file_bytes in (1, 4 << 30):
        world = replace(large, model=replace(large.model, file_bytes=file_bytes)).with_profile(rest=tuple(rest))
        yield f"scores beside {file_bytes} bytes", world, ("cpu",)

    tight = World(compute_per_token=1 << 16, workload=Workload(n_prompt=64, n_gen=8, n_ctx=512))
    yield "no room for 512 tokens", replace(tight, room=-300 * (1 << 16)), ("oato", "layers", "scheinfer")
    yield (
        "no room for the KV",
        World(workload=DEEP, room=-2_000_000, compute_per_token=64),
        ("layers", "oato", "atsinfer"),
    )
    prompt = Workload(n_prompt=2000, n_gen=1, n_ctx=4096)
    yield "raised", slow_cpu(workload=prompt, share=0.2, compute_per_token=64), ("layers", "fit", "flexgen")
    yield "slow card", World(card=replace(CARD, bytes_per_s=1e9), share=0.6), ("oato", "atsinfer", "split")


RULES = {
    "oato": (Rules(affinity="paper"), Rules(fill="full"), Rules(affinity="paper", fill="paper")),
    "hetegen": (Rules(prefetch="layer"),),
    "scheinfer": (Rules(prefetch="layer"),),
}


def text_of(name: str, world: World, policies: tuple[str, ...]) -> str:
    lines = [f"== {name}"]
    for policy in policies:
        more = RULES.get(policy, ()) if name in ("slow CPU", "streamed") else ()
        for rules in (Rules(), *more):
            changed = [getattr(rules, field.name) for field in fields(rules)]
            said = [value for value in changed if value not in ("default", "continue", "ahead")]
            lines += [" ".join((policy, *said)), *(f"  {line}" for line in lines_of(world, policy, rules))]
    return "\n".join(lines) + "\n"


def lines_of(world: World, policy: str, rules: Rules) -> Iterator[str]:
    larger = larger_ubatches(world.workload, world.options)
    try:
        plan = world.plan(policy, rules=rules, larger_ubatches=larger)
    except OallamaError as error:
        yield str(error)
        return
    made, bound, held = plan.predicted, plan.bound, plan.memory
    yield f"{plan.policy} on {plan.device}: {made.ttft_s:.6g} s, {made.tpot_s:.6g} s"
    yield f"bound {bound.ttft_s:.6g} s, {bound.tpot_s:.6g} s; KV {held.kv}, staging {held.staging}, spare {held.spare}"
    yield f"{plan.n_gpu_layers} layers, {plan.workload.n_ubatch} at once, flash attention {plan.attention.flash_attn}"
    if plan.streaming:
        yield f"{plan.streaming}, tokens {plan.token_assignment}"
    places: dict[str, list[str]] = {}
    for place in plan.operators:
        cut = f"{place.cc:.6g}/{place.cg:.6g}/{place.gg:.6g} {place.layout or ''} {place.hot_experts or ''}".rstrip()
        places.setdefault(cut, []).append(place.name.removesuffix(".weight").removeprefix("blk."))
    for cut, names in places.items():
        yield f"{cut}: {' '.join(names)}"
    yield from plan.notes


if __name__ == "__main__":
    from oallama.planner.runtime import RUNTIME_BYTES

    RUNTIME_BYTES["CUDA"] = 0  # as in the fixture small_cards
    FILE.write_text("".join(text_of(*one) for one in worlds()), encoding="utf-8")
