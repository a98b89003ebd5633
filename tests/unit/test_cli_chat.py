"""Chat templates are programs from a stranger: what they may do, and what happens when they do something else."""

import pytest

from oallama.cli.chat import MAX_TEMPLATE_CHARS, render
from oallama.core.errors import ModelFileError

MESSAGES = [{"role": "user", "content": "Why is the sky blue?"}]
MARKS = {"bos_token": "<s>", "eos_token": "</s>"}


def test_a_common_template():
    template = (
        "{{ bos_token }}{% for m in messages %}\n"
        "{% if m['role'] not in ['user', 'assistant'] %}{{ raise_exception('role?') }}{% endif %}\n"
        "<|{{ m.role }}|>{{ m.content | trim }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    assert render(template, MESSAGES, MARKS) == "<s><|user|>Why is the sky blue?</s><|assistant|>"


def test_what_templates_of_others_use():
    template = (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% break %}{% endfor %}"
        "{{ ns.n }}{{ messages | tojson }}{% if tools %}T{% endif %}{{ strftime_now('%Y') | length }}"
    )
    assert render(template, MESSAGES, MARKS) == '1[{"content": "Why is the sky blue?", "role": "user"}]4'


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__['os'] }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ messages.append(1) }}",
        "{% include '/etc/passwd' %}",
        "{% for m in %}",
        "{{ raise_exception('no') }}",
        "{{ 'x' * 10**12 }}",
        "{{ 'x' * 500000000 }}",
        "x" * (MAX_TEMPLATE_CHARS + 1),
    ],
)
def test_what_leaves_the_sandbox_or_its_limits_is_an_error(template):
    with pytest.raises(ModelFileError, match="--no-chat"):
        render(template, MESSAGES, MARKS)


def test_a_template_that_never_ends_is_ended():
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(ModelFileError, match="cannot be used"):
        render(endless, MESSAGES, MARKS, timeout_s=1.5)


def test_a_template_does_not_see_what_it_was_not_given():
    assert render("{{ secret is defined }} {{ open is defined }}", MESSAGES, MARKS) == "False False"
