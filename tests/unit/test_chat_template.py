"""Chat templates are programs of strangers: what they may do, what transformers offers them, where they end. Whether a
run chats or continues."""

import pytest
from gguf_factory import write_gguf

from oallama.core.errors import ModelFileError, UsageError
from oallama.model.chat_template import MAX_TEMPLATE_CHARS, render_chat
from oallama.run.template import Prompt, prompt_of, template_of
from oallama.stores.default_model import FILE

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Why is <the> sky “blue”?"},
]

CHATML = """\
{%- if tools %}<tools>{% endif -%}
{% for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' -}}
{% endfor %}
{% if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""


def render(template, **options):
    return render_chat(template, MESSAGES, "<s>", "</s>", **options)


def test_a_real_template():
    said = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhy is <the> sky “blue”?<|im_end|>\n"
    assert render(CHATML) == said + "<|im_start|>assistant\n"
    assert render(CHATML, add_generation_prompt=False) == said
    assert render(CHATML, tools=[{"name": "f"}]).startswith("<tools>")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ bos_token }}{{ eos_token }}", "<s></s>"),
        ("{{ messages[1] | tojson }}", '{"role": "user", "content": "Why is <the> sky “blue”?"}'),
        ("{{ {'b': [1, 2]} | tojson(indent=1) }}", '{\n "b": [\n  1,\n  2\n ]\n}'),
        ("{{ 'ü' | tojson(ensure_ascii=true) }}", '"\\u00fc"'),
        ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}", '{"a": 2, "b": 1}'),
        ("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% endfor %}", "user"),
        ("{% for m in messages %}{{ m.role }}{% break %}{% endfor %}", "system"),
        ("{% generation %}kept{% endgeneration %}", "kept"),
        ("{{ undefined_variable is defined }}{{ tools is none }}", "FalseTrue"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "2"),
        ("{{ 'a b'.split(' ') | join('-') }}", "a-b"),
    ],
)
def test_what_transformers_offers(template, expected):
    assert render(template) == expected


def test_reasoning_is_under_every_name_that_templates_read():
    names = "{% for m in messages %}{{ m.reasoning_content }},{{ m.thinking }},{{ m.reasoning }};{% endfor %}"
    told = [{"role": "assistant", "reasoning": "a"}, {"role": "assistant", "thinking": "b"}, {"role": "user"}]
    assert render_chat(names, told, "", "") == "a,a,a;b,b,;,,;"


def test_a_refusal_is_passed_on_in_one_line():
    with pytest.raises(ModelFileError, match="it refuses the messages: no system role") as caught:
        render("{{ raise_exception('no system\\nrole') }}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",  # CVE-2024-34359
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ lipsum.__globals__['os'].system('id') }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__closure__ }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
        "{{ messages | map(attribute='__class__') | list | first | attr('mro') }}",
        "{{ messages.append({'role': 'user'}) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os.system('id') }}",
    ],
)
def test_the_sandbox_holds(template):
    """Refused, or left with something harmless: never what it was after."""
    try:
        text = render(template)
    except ModelFileError as error:
        assert "the chat template cannot be used" in str(error)
    else:
        assert not any(sought in text for sought in ("uid=", "root:", "<class 'object'>", "<module"))


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for m in %}", "line 1 is wrong"),
        ("\n\n{{ unclosed", "line 3 is wrong"),
        ("{{ messages.nothing.of_this }}", "has no attribute"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
        ("{% for i in range(20) %}{{ 'x' * 10**6 }}{% endfor %}", "more than 16777216 characters"),
        ("{{ 'x' * 10**11 }}", "of memory"),
        ("{{ ('x' * 2**17) * 2**17 }}", "of memory"),
        ("{{ [0] * 9**9 }}", "of memory"),
        ("{{ messages[0].role * 10**9 }}", "of memory"),
        ("{{ 'x' | center(10**10) }}", "of memory"),
        ("{{ ('a\n' * 10**4) | indent(10**6) }}", "of memory"),
        (
            "{% set ns = namespace(a=[0]) %}{% for i in range(60) %}{% set ns.a = ns.a + ns.a %}{% endfor %}",
            "of memory",
        ),
        ("{{ raise_exception('x' * 10**7) }}", "it refuses the messages: xxx"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself without end"),
        ("x" * (MAX_TEMPLATE_CHARS + 1), "which no real one has"),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", ""),
    ],
)
def test_faults_are_told(template, reason):
    with pytest.raises(ModelFileError) as caught:
        render(template)
    assert reason in str(caught.value)
    assert "give the prompt without a chat template" in str(caught.value)


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 10 ** (10 ** 8) }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
)
def test_a_template_without_end_is_ended(template):
    with pytest.raises(ModelFileError, match=r"it takes more than 1 s of computing"):
        render(template)


# ---- whether a run chats or continues

ROLES = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ '<answer>' if add_generation_prompt }}"


@pytest.mark.parametrize(
    ("file", "template", "chat", "system", "prompt"),
    [
        ("chatty.gguf", ROLES, None, None, Prompt("<user>hi<answer>", ends=True)),
        ("chatty.gguf", ROLES, True, None, Prompt("<user>hi<answer>", ends=True)),
        ("chatty.gguf", ROLES, False, None, Prompt("hi")),
        ("plain.gguf", None, None, None, Prompt("hi")),
        ("plain.gguf", None, False, None, Prompt("hi")),
        (FILE, ROLES, None, None, Prompt("hi", ends=True)),  # it tells stories
        (FILE, ROLES, True, None, Prompt("<user>hi<answer>", ends=True)),
        ("chatty.gguf", ROLES, None, "be brief", Prompt("<system>be brief<user>hi<answer>", ends=True)),
        (FILE, ROLES, None, "be brief", Prompt("<system>be brief<user>hi<answer>", ends=True)),
        ("plain.gguf", None, True, None, "no chat template; use --no-chat"),
        ("plain.gguf", None, None, "be brief", "no chat template"),
        ("chatty.gguf", ROLES, False, "be brief", "does not go with --no-chat"),
        ("bad.gguf", "{{ messages.append(1) }}", None, None, "use --no-chat"),
    ],
)
def test_a_model_with_a_template_chats_unless_told_not_to(tmp_path, file, template, chat, system, prompt):
    path = str(write_gguf(tmp_path / file, "llama", chat_template=template))
    if isinstance(prompt, Prompt):
        assert prompt_of(path, "hi", chat, system) == prompt
    else:
        with pytest.raises((UsageError, ModelFileError), match=prompt):
            prompt_of(path, "hi", chat, system)


def test_the_begin_token_is_not_added_to_a_template_that_writes_it(tmp_path):
    bos_7 = {"tokenizer.ggml.bos_token_id": 7}
    path = str(write_gguf(tmp_path / "m.gguf", "llama", chat_template="{{ bos_token }}" + ROLES, metadata=bos_7))
    template, bos, _ = template_of(path)
    assert template.startswith("{{ bos_token }}") and bos
    assert prompt_of(path, "hi", True) == Prompt(f"{bos}<user>hi<answer>", add_special=False, ends=True)
