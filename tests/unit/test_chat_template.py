"""Chat templates are programs of strangers: what they may do, what transformers offers them, and where they end."""

from __future__ import annotations

import pytest

from oallama.core.errors import ModelFileError
from oallama.model.chat_template import MAX_TEMPLATE_CHARS, render_chat

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


def render(template: str, **options: object) -> str:
    return render_chat(template, MESSAGES, "<s>", "</s>", **options)  # type: ignore[arg-type]


def test_a_real_template() -> None:
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
def test_what_transformers_offers(template: str, expected: str) -> None:
    assert render(template) == expected


def test_reasoning_is_under_every_name_that_templates_read() -> None:
    names = "{% for m in messages %}{{ m.reasoning_content }},{{ m.thinking }},{{ m.reasoning }};{% endfor %}"
    told = [{"role": "assistant", "reasoning": "a"}, {"role": "assistant", "thinking": "b"}, {"role": "user"}]
    assert render_chat(names, told, "", "") == "a,a,a;b,b,;,,;"


def test_a_refusal_is_passed_on_in_one_line() -> None:
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
def test_the_sandbox_holds(template: str) -> None:
    """Refused, or left with something harmless: never what it was after."""
    try:
        text = render(template)
    except ModelFileError as error:
        assert "the chat template cannot be used" in str(error)
    else:
        assert "uid=" not in text
        assert "root:" not in text
        assert "<class 'object'>" not in text
        assert "<module" not in text


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
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", ""),
    ],
)
def test_faults_are_told(template: str, reason: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        render(template)
    assert reason in str(caught.value)
    assert "give the prompt without a chat template" in str(caught.value)


def test_a_template_of_a_megabyte_is_not_tried() -> None:
    with pytest.raises(ModelFileError, match="which no real one has"):
        render("x" * (MAX_TEMPLATE_CHARS + 1))


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "template",
    [
        ENDLESS,
        "{{ 10 ** (10 ** 8) }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
)
def test_a_template_without_end_is_ended(template: str) -> None:
    with pytest.raises(ModelFileError, match=r"it takes more than 1 s of computing"):
        render(template)
