"""What a command line asks for: model and prompt, limits, policies, and what the user is told to type next."""

import io
import json
import re
import sys
import threading
import time
from dataclasses import asdict, replace
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

import click
import pytest
from processes import until
from worlds import model_info, weights_of

from oallama.cli import tuning as cli_tuning
from oallama.cli.output import busy, log, time_bar, turn_bar, write_stream
from oallama.cli.placement_options import PlacementOptions
from oallama.cli.policy import PolicyOptions, note_planned, note_unused
from oallama.cli.prompt import model_and_prompt, read_prompt
from oallama.cli.run import command, cut_text
from oallama.cli.speculation import StepOptions
from oallama.core.codec import from_json
from oallama.core.errors import DoesNotFit, UsageError
from oallama.core.options import Options
from oallama.core.types import Attention, Workload
from oallama.core.units import MIB, parse_bytes, parse_memory
from oallama.device.load_params import LoadSettings
from oallama.run.answer import DEFAULT_TOKENS, WITHOUT_END, Generation, Stream
from oallama.run.prompt import Prompt
from oallama.stores.default_model import FILE

# ---- which word is the model and which the prompt


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of a user who has some models."""
    monkeypatch.chdir(tmp_path)
    for name in ("weights", "some.Q4_K_M.gguf", "dir/inside.gguf", "models/llama-3.2-1b.gguf", "models/notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"GGUF")


@pytest.mark.parametrize(
    ("word", "first"),
    [
        ("llama3", "models/llama-3.2-1b.gguf"), ("llama3:8b", "models/llama-3.2-1b.gguf"),
        ("./dir", "dir/inside.gguf"), ("dir", "dir/inside.gguf"), ("some.Q4_K_M", "some.Q4_K_M.gguf"),
        ("some", "some.Q4_K_M.gguf"), ("Qwen2-7B-Instruct", ""), ("models/nothing", "models/llama-3.2-1b.gguf"),
        ("mistral", ""),
    ],
)  # fmt: skip
def test_a_word_that_looks_like_a_model_is_no_prompt_and_models_near_by_are_named(folder, word, first):
    for words in ([word], [word, "hello"]):
        with pytest.raises(UsageError) as refused:
            model_and_prompt(words, None, None)
        said = str(refused.value)
        assert said.startswith(f"{word} is neither a GGUF file nor a downloaded model; ")
        assert "GGUF files nearby: " + first in said and "notes.txt" not in said
    assert model_and_prompt([], None, word) == (None, word)  # by -p it is the prompt
    assert model_and_prompt([word], "my.gguf", None) == ("my.gguf", word)


@pytest.mark.parametrize(
    "word", ["Hello", "Hi!", "Why?", "2+2=", "don't", "Hello.", "llama3 is what?", "philosophy", "hi", "éé", "...", ""]
)
def test_a_word_that_is_none_is_the_prompt(folder, word):
    assert model_and_prompt([word], None, None) == (None, word)


@pytest.mark.parametrize(
    ("words", "model", "prompt", "found"),
    [
        (["weights", "hi"], None, None, ("weights", "hi")),
        (["weights"], None, "hi", ("weights", "hi")),
        (["hi"], "weights", None, ("weights", "hi")),
        ([], "weights", "hi", ("weights", "hi")),
        ([], None, None, (None, None)),
        (["weights"], "other.gguf", None, ("other.gguf", "weights")),  # -m is the model
        (["why", "is", "it"], None, None, "quote a prompt of several words"),
        (["a.gguf", "hi"], "b.gguf", None, "quote a prompt of several words"),
        (["hi"], "b.gguf", "ho", "the prompt is given twice"),
        (["a.gguf", "hi"], None, "ho", "the prompt is given twice"),
    ],
)
def test_model_and_prompt_in_every_spelling(folder, words, model, prompt, found):
    if isinstance(found, tuple):
        assert model_and_prompt(words, model, prompt) == found
    else:
        with pytest.raises(UsageError, match=found):
            model_and_prompt(words, model, prompt)


def bytes_as_text(data, errors):
    return io.TextIOWrapper(io.BytesIO(data), encoding="utf-8", errors=errors)


def test_a_pipe_brings_the_prompt_or_what_comes_before_it(monkeypatch):
    assert read_prompt(None, io.StringIO("Once upon\na time\n")) == "Once upon\na time"
    assert read_prompt("-", io.StringIO("piped")) == "piped"
    assert read_prompt("Sum it up:", io.StringIO("A text.\n")) == "A text.\n Sum it up:"
    assert read_prompt("given", io.StringIO("")) == "given"
    assert read_prompt("-", io.StringIO("not read"), of_file=True) == "-"
    terminal = io.StringIO("x")
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    assert read_prompt("given", terminal) == "given" and terminal.read() == "x", "a terminal is not waited for"
    monkeypatch.setenv("TERM", "dumb")
    assert read_prompt("given", terminal) == "given"
    monkeypatch.setenv("TERM", "xterm")
    for prompt, stdin, says in (
        (None, terminal, "no prompt"),
        (None, io.StringIO(""), "the prompt is empty"),
        ("", io.StringIO(""), "the prompt is empty"),
        (None, bytes_as_text(b"\xff\xfe", "strict"), "not UTF-8"),
        (None, bytes_as_text(b"a\xff", "surrogateescape"), "not UTF-8"),
        ("a\udcff", io.StringIO(""), "not UTF-8"),
        ("a", bytes_as_text(b"\xff", "strict"), "not UTF-8"),
    ):
        with pytest.raises(UsageError, match=says):
            read_prompt(prompt, stdin)


def test_a_seed_that_is_not_given_is_random_and_options_have_llama_cpps_names():
    def values(*words):
        return command.make_context("run", ["hi", *words]).params

    assert values()["seed"] != values()["seed"] != values("--seed", "-1")["seed"]
    told = values("--seed", "7", "--temperature", "0", "--n-predict", "3")
    assert (told["seed"], told["temperature"], told["n_gen"]) == (7, 0.0, 3)


def test_the_built_in_model_is_named_when_it_is_used(capsys, monkeypatch):
    def of_file(path, *_):
        assert path.endswith(FILE)
        raise UsageError("found")

    monkeypatch.setattr("oallama.cli.placement_options.default_model", lambda: f"/models/{FILE}")
    monkeypatch.setattr("oallama.placer.Placer.of_file", of_file)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    with pytest.raises(UsageError, match="found"):
        command.main(["-p", "Once"], standalone_mode=False)
    assert FILE in capsys.readouterr().err


def test_an_answer_is_as_long_as_the_model_wants_unless_text_is_continued_or_a_length_is_asked_for():
    assert Prompt("hi", ends=True).most(None) == WITHOUT_END
    assert Prompt("hi").most(None) == DEFAULT_TOKENS
    assert Prompt("hi", ends=True).most(5) == 5


@pytest.mark.parametrize(
    ("end", "says"),
    [("limit", "after 7 tokens; use -n -1"), ("context", "context of 256 tokens is full; use -c 512"), ("model", ""),
     ("stop", "")],
)  # fmt: skip
def test_an_answer_that_was_cut_says_so_and_what_gives_more(end, says):
    said = cut_text(Generation("a", (1,) * 7, 3, 7, 0.1, 0.1, end), 256)
    assert says in said and bool(said) == bool(says)


# ---- limits


def test_sizes_and_shares_may_be_text_and_none_asks_for_nothing():
    asked = Options.given(device="CUDA0", vram="6GiB", gpu_weights="50%", threads=None, flash_attn=None)
    assert asked == Options(device="CUDA0", vram=6 << 30, gpu_weights=0.5)
    assert Options.given(vram=123, gpu_weights=0.25) == Options(vram=123, gpu_weights=0.25)
    for text in ("0", "1048576", "12B", "12KiB", "6442450944"):
        assert parse_memory(text) == parse_bytes(text)
    for text in ("12", " 6 ", "1.5"):  # a size without a unit is not taken for bytes
        with pytest.raises(ValueError, match=f"write the unit, e.g. {text.strip()}GiB"):
            parse_memory(text)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"vram": "12"}, "--vram: '12' is 12 bytes; write the unit, e.g. 12GiB"),
        ({"vram_fill": 0.0}, "--vram-fill must be above 0 and at most 1, not 0"),
        ({"gpu_weights": 1.5}, "--gpu-weights must be from 0 to 1"),
        ({"vram": -1}, "--vram must not be negative"),
        ({"vram": "much"}, "--vram: "),
        ({"gpu_weights": "half"}, "--gpu-weights: "),
        ({"type_k": "q3"}, "unknown KV cache type 'q3'; choose from f32, f16"),
        ({"flash_attn": "maybe"}, "unknown -fa 'maybe'"),
        ({"type_v": "Q8_0", "flash_attn": "off"}, "a V cache of type q8_0 needs flash attention"),
    ],
    ids=str,
)
def test_what_cannot_be_asked_for_is_refused_in_one_sentence(asked, message):
    with pytest.raises(UsageError) as refused:
        Options.given(**asked)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_attention_is_what_was_asked_for_then_what_was_planned():
    planned = Attention(flash_attn="off", type_k="q8_0", type_v="f16")
    quantised = Attention(flash_attn="on", type_k="q8_0", type_v="q8_0")
    assert Options().attention() == Attention(flash_attn="auto", type_k="f16", type_v="f16")
    assert Options().attention(planned) == planned
    assert Options(flash_attn="on", type_v="Q8_0").attention(planned) == quantised
    assert Options(type_v="q8_0").attention(planned) == quantised  # which off does not go with


def test_what_a_load_gets_survives_the_way_to_a_child():
    settings = LoadSettings("model.gguf", "CUDA0", host_patterns=(("a.*", None), ("b", "CPU")), n_gpu_layers=3)
    assert from_json(LoadSettings, json.loads(json.dumps(asdict(settings))), "the load") == settings


# ---- policies

LOAD = Workload(n_prompt=64, n_gen=16, n_ctx=512, n_ubatch=128)
MODEL = model_info(n_layer=2)


def placer_with(spare=0, device="RPC0"):
    """A placer on a device with so many bytes to spare; its plan is what it was asked for."""

    def plan(given, **asked):
        return SimpleNamespace(given=given, asked=asked, memory=SimpleNamespace(limit=100, spare=spare))

    profile = SimpleNamespace(device=device)
    return SimpleNamespace(
        model=MODEL, operators=weights_of(MODEL), profile=lambda: profile, plan=plan, has_device=True
    )  # fmt: skip


def test_layers_are_planned_for_the_micro_batch_that_is_run():
    placer = placer_with()
    made = PolicyOptions(None, 2).plan(placer, LOAD)
    assert [*made.given.on_device] == [o.name for o in placer.operators if o.layer in (1, None)]
    assert (made.given.gpu_layers, made.given.name, made.asked) == (2, "layers", {"workload": LOAD})
    with pytest.raises(DoesNotFit, match="-ngl 2 needs 105 B on RPC0"):
        PolicyOptions(None, 2).plan(placer_with(spare=-5), LOAD)


@pytest.mark.parametrize(("profile", "given"), [(None, "cpu"), ("CPU", "cpu"), ("RPC0", "layers")])
def test_layers_stay_on_the_cpu_without_a_device_and_nothing_is_measured_for_it(profile, given):
    placer = placer_with()
    placer.has_device = False
    placer.known_profile = None if profile is None else SimpleNamespace(device=profile)
    placer.profile = None  # which measures
    made = PolicyOptions(None, 99).plan(placer, LOAD)
    assert getattr(made.given, "name", made.given) == given
    assert PolicyOptions(None, 99).keeps_to_cpu(placer)


@pytest.mark.parametrize("policy", ["hetegen", "twinpilots", "flexgen", "atsinfer"])
def test_prefetch_is_for_policies_that_stream(policy):
    if policy != "atsinfer":
        made = PolicyOptions(policy, None, prefetch="layer").plan(placer_with(), LOAD)
        assert (made.given, made.asked["prefetch"]) == (policy, "layer")
    else:
        with pytest.raises(UsageError, match="streams none"):
            PolicyOptions(policy, None, prefetch="layer").plan(placer_with(), LOAD)


@pytest.mark.parametrize(
    ("policy", "options", "has_device", "says"),
    [
        ("hetegen", {}, False, "note: --policy hetegen has no effect without a device; choose one with --device"),
        ("oato", {"vram": 1}, False, "note: --vram and --policy oato have no effect without a device"),
        ("hetegen", {"vram": 1}, True, ""), ("auto", {}, False, ""), ("cpu", {}, False, ""), (None, {}, False, ""),
    ],
)  # fmt: skip
def test_a_policy_that_needs_a_device_says_that_there_is_none(capsys, policy, options, has_device, says):
    note_unused(SimpleNamespace(options=Options(**options), has_device=has_device), PolicyOptions(policy, None))
    said = capsys.readouterr().err
    assert said.startswith(says) and bool(said) == bool(says)


def test_layers_without_a_device_are_told_to_have_no_effect(capsys):
    placer = SimpleNamespace(options=Options(), has_device=False)
    note_unused(placer, PolicyOptions(None, 99))
    assert capsys.readouterr().err == "note: -ngl has no effect without a device; choose one with --device\n"
    note_unused(placer, PolicyOptions(None, 0))
    assert capsys.readouterr().err == ""


def test_limits_that_a_plan_does_not_heed_are_said(capsys):
    note_planned(Options(vram=1, gpu_weights=0.5, vram_fill=0.5))
    note_planned(Options(vram_fill=0.8))
    note_planned(Options(n_ctx=512))
    assert capsys.readouterr().err.splitlines() == [
        "note: --vram and --gpu-weights and --vram-fill have no effect with --plan, which sets the placement",
        "note: --vram-fill has no effect with --plan, which sets the placement",
    ]


# ---- measuring


def test_what_to_type_measures_what_was_run():
    asked = Options(
        device="emulated:rtx3060,link=12", vram=300 * MIB, threads=2, n_ctx=8192, type_k="q8_0", late_first_word=True
    )
    placer = SimpleNamespace(
        model=SimpleNamespace(path="/my models/m.gguf"), options=asked, drafter=SimpleNamespace(flags=("--spec", "mtp"))
    )
    assert cli_tuning.tune_command(placer, Workload(n_prompt=19, n_gen=24, n_ctx=8192, n_past=100)) == (
        "`oallama tune '/my models/m.gguf' --device emulated:rtx3060,link=12 --vram 300MiB --threads 2 "
        "--cache-type-k q8_0 --late-first-word --spec mtp -c 8192`"
    )
    both = replace(asked, device="CUDA0,CUDA1", other_vram=(200 * MIB,))
    told = cli_tuning.tune_command(
        SimpleNamespace(**{**vars(placer), "options": both}), Workload(19, 24, 8192, n_past=100)
    )
    assert "--device CUDA0,CUDA1 --vram 300MiB,200MiB --threads 2" in told
    with click.Context(click.Command("run")) as context:
        context.params["profile"] = "p.json"
        told = cli_tuning.tune_command(placer, Workload(n_prompt=19, n_gen=24, n_ctx=8192))
    assert told.endswith("-c 8192 --profile p.json`"), "another profile has other results"


def test_a_number_of_requests_that_is_asked_for_is_planned_for_though_a_plan_was_measured_for_one(capsys):
    def of(**step):
        return PlacementOptions(None, PolicyOptions(), Options(), None, True, "never", StepOptions(**step))

    assert of().expecting(4) == of(), "what was measured is used"
    asked = of(expected=3).expecting(8)
    assert (asked.step.expected, asked.step.slots, asked.tuned) == (3, 8, False)
    assert of(expected=1).expecting(8).tuned and capsys.readouterr().err == ""
    drafting = of(spec="mtp").expecting(4)
    assert drafting.step.expected == 2 and "planned for 2 requests in flight" in capsys.readouterr().err


BARS = re.compile(r"\r *(\d+)%\|.*?\| (?:turn (\d+) of 24, )?(?:00:00 of about 20 s|00:00): ([a-z ]*)(?=\r)")


def test_the_bar_shows_the_time_and_says_when_it_takes_longer(monkeypatch, capsys):
    monkeypatch.setattr("oallama.cli.output.is_terminal", lambda stream: stream is sys.stderr)
    monkeypatch.setattr("oallama.cli.output.TICK_S", 60.0)
    times = iter([100.0, 100.0, 107.5, 130.0])
    with time_bar(20.0, lambda: next(times)) as show:
        show("plan")
        show("load split", expect=24)
        show("", done=42)
    said = capsys.readouterr().err
    bars = BARS.findall(said.replace("measuring", ""))
    assert bars == [("0", "", ""), ("0", "", "plan"), ("35", "", "load split")]
    assert "longer than the expected 20 s: load split" in said and "100%" not in said


def test_what_takes_long_is_said_on_a_terminal_until_it_is_over(monkeypatch, capsys):
    monkeypatch.setattr("oallama.cli.output.TICK_S", 0.01)
    monkeypatch.setattr("oallama.cli.output.PATIENCE_S", 0.0)
    with busy("planning"):
        pass
    assert capsys.readouterr().err == "", "nobody sees it"
    monkeypatch.setattr("oallama.cli.output.is_terminal", lambda stream: stream is sys.stderr)
    monkeypatch.setitem(sys.modules, "tqdm", ModuleType("tqdm"))  # as while it is imported
    shown = "\rloading a\\x1bm.gguf: 0 s\x1b[K\r"
    with busy("loading a\x1bm.gguf"):
        said = until(lambda: capsys.readouterr().err)
        assert said.startswith(shown)
        log("note")
        assert "\r\x1b[Knote\n" in capsys.readouterr().err, "a sentence has a line of its own"
        until(lambda: shown in capsys.readouterr().err)
        monkeypatch.delitem(sys.modules, "tqdm")
        with time_bar(20.0):  # which says it better
            capsys.readouterr()
            time.sleep(0.1)
            assert "loading" not in capsys.readouterr().err
    assert capsys.readouterr().err.endswith("\r\x1b[K")
    assert not [thread for thread in threading.enumerate() if thread.name == "ticking"]


def test_what_takes_long_is_done_where_no_thread_can_say_so(monkeypatch):
    monkeypatch.setattr("oallama.cli.output.is_terminal", lambda stream: True)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        with busy("planning"):
            done = True
    assert done


def test_an_answer_is_written_as_it_comes_and_the_wait_for_its_first_piece_is_told(monkeypatch, capsys):
    monkeypatch.setattr("oallama.cli.output.TICK_S", 0.01)
    monkeypatch.setattr("oallama.cli.output.PATIENCE_S", 0.0)
    monkeypatch.setattr("oallama.cli.output.is_terminal", lambda stream: stream is sys.stderr)
    told, answer, written = "", Generation("abc", (), 1, 3, 0.1, 0.1, "model"), []

    def pieces():
        nonlocal told
        told = until(lambda: capsys.readouterr().err)
        for piece in "abc":
            yield piece
            assert capsys.readouterr().out == piece
        return answer

    assert write_stream(Stream(pieces()), written) == answer and written == ["a", "b", "c"]
    assert "reading the prompt: 0 s" in told and capsys.readouterr().out == "\n"


def test_the_bar_of_a_comparison_has_words_first_and_then_one_total(capsys):
    with turn_bar(True) as show:
        show("plan")
        words = capsys.readouterr().err
        show("", expect=24)
        for _ in range(42):  # blocks that are measured again
            show("measure split", done=1)
    assert "plan" in words and "turn" not in words
    turns = [int(turn) for _, turn, _ in BARS.findall(capsys.readouterr().err)]
    assert turns == [*range(24), *[24] * 19]
