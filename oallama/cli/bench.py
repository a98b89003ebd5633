"""`oallama bench`: policies and stock llama.cpp against each other, honestly."""

from __future__ import annotations

from functools import partial

import click

from oallama.cli.bars import turn_bar
from oallama.cli.bench_matrix import matrix_option
from oallama.cli.bench_options import (
    DEFAULT_REPS,
    ResultOptions,
    TimedOptions,
    TurnOptions,
    parse_names,
    result_options,
    timed_options,
    turn_options,
)
from oallama.cli.help import Command, Group, option
from oallama.cli.options import (
    CONTEXT,
    PLACEMENT,
    check_gate,
    count,
    gate_option,
    gathered,
    model_argument,
    parsed,
    profile_option,
    refresh_gate_option,
)
from oallama.cli.policy import PolicyOptions, note_unused, rules_options
from oallama.core.errors import UsageError
from oallama.core.options import Options


@click.command("bench", cls=Command)
@matrix_option
@model_argument
@option(
    "--arms", type=parsed(parse_names), metavar="A,B,…", group=Group.COMPARED, show_default="stock-fit,auto",
    help="Policies, plans (*.json), stock-cpu, -ngl, -fit, -ncmoe.\f Ratios refer to the first. -ubN behind a name: "
    "with micro-batches of N tokens. Without a device the default is stock-cpu,auto.",
)  # fmt: skip
@option(
    "--stock-args", "stock_args", multiple=True, metavar="FLAGS", group=Group.COMPARED,
    help="One more arm: stock llama.cpp with your flags.\f These are -ngl, -ot, -ncmoe, -cmoe, -fa, -ctk, -ctv, -t, -b "
    "and -ub.",
)  # fmt: skip
@timed_options
@option(
    "-r", "--repetitions", type=count(2, 1000), default=DEFAULT_REPS, show_default=True, metavar="N",
    group=Group.TIMED,
    help="Samples of each arm and test; a ratio needs 6.\f They are taken in turns A B B A, so rounded up to an even "
    "number.",
)  # fmt: skip
@result_options
@gathered(*PLACEMENT, *CONTEXT)
@rules_options
@profile_option
@turn_options
@gate_option
@refresh_gate_option
@option("--progress/--no-progress", default=None, advanced=True, show_default="on a terminal", help="Show a bar.")
def command(
    model: str,
    arms: tuple[str, ...] | None,
    stock_args: tuple[str, ...],
    timed: TimedOptions,
    repetitions: int,
    results: ResultOptions,
    options: Options,
    policy: PolicyOptions,
    profile: str | None,
    turns: TurnOptions,
    gate: bool,
    refresh_gate: bool,
    progress: bool | None,
) -> None:
    """Measure policies and stock llama.cpp against each other, in turns and under one memory cap.

    \b
      oallama bench model.gguf
      oallama bench model.gguf --arms stock-fit,stock-ngl,oato,auto --vram 6GiB -r 10 -o result.json
      oallama bench model.gguf --stock-args "-ngl 20 -fa on" --arms auto -pg 512,128 -d 4096
      oallama bench --matrix many.toml -o many.json

    \f
    Each arm runs in a process of its own, with the same tokens. The result says how many times faster than the first
    each one is, with the 95 % interval of that. No ratio is given where two arms turn out to be the same, or where an
    arm did not do what it says: where the weights lie is read back after the load. Stock arms load no plugin of ours.
    """
    from oallama.bench.ab import run_bench
    from oallama.bench.arms import ArmMaker
    from oallama.bench.prepare import default_arms, prepare, shared_setting
    from oallama.gate.run import gated_arm
    from oallama.placer import Placer

    check_gate(gate, refresh_gate)
    if policy.tells_oato and "oato" not in (arms or ()):
        raise UsageError("--affinity and --fill say how oato places, and no arm is oato; name it in --arms")
    results.check()
    tests = timed.tests()
    placer = Placer.of_file(model, options, profile)
    note_unused(placer)
    setting = shared_setting(placer, tests, turns.cpus or (), turns.seed)
    auto = partial(gated_arm, refresh=refresh_gate) if gate else None
    with turn_bar(progress) as shown:
        maker = ArmMaker(placer, setting, tests, policy.rules, shown, auto)
        bench = prepare(
            maker,
            arms or default_arms(placer),
            stock_args,
            n_blocks=-(-repetitions // 2),
            resident=False if turns.reload else None,
        )
        result = run_bench(bench, shown, results.save)
        results.save(result)
    results.tell(result)
    if result.interrupted:
        raise KeyboardInterrupt
