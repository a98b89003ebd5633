"""Which drafts were accepted: read from llama-server's metrics, added up, and made rates of."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oallama.profile.acceptance import ENOUGH_STEPS, NO_ACCEPTANCE, PUBLISHED, Acceptance, acceptance_in

METRICS = """# TYPE llamacpp:spec_decode_num_drafts_total counter
llamacpp:spec_decode_num_drafts_total 80
# TYPE llamacpp:spec_decode_num_accepted_tokens_per_pos_total counter
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 60
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 40
"""


@st.composite
def acceptances(draw: st.DrawFn) -> Acceptance:
    n_steps = draw(st.integers(1, 10000))
    counts = draw(st.lists(st.integers(0, n_steps), min_size=1, max_size=9))
    return Acceptance(n_steps, tuple(sorted(counts, reverse=True)))


def test_metrics_of_drafts_are_read_and_others_are_none():
    assert acceptance_in(METRICS) == Acceptance(80, (60, 40))
    assert acceptance_in(METRICS.replace("drafts_total 80", "drafts_total 0")) is None
    assert acceptance_in(METRICS.replace('position="0"', 'position="7"')) is None
    assert acceptance_in("") is None


def test_few_steps_say_nothing_and_many_say_also_what_further_drafts_would_be():
    assert NO_ACCEPTANCE.rates == Acceptance(ENOUGH_STEPS - 1, (1, 1)).rates == PUBLISHED
    first, second, *others = Acceptance(100, (50, 20)).rates
    assert (first, second) == (0.5, 0.2)
    assert others == pytest.approx([0.2 / PUBLISHED[1] * rate for rate in PUBLISHED[2:]])


@given(acceptances(), acceptances())
def test_rates_fall_and_those_of_both_lie_between_both(one, other):
    both = one.with_more(other)
    assert len(both.rates) == len(PUBLISHED)
    assert all(0 <= later <= before <= 1 for before, later in zip((1, *both.rates), both.rates, strict=False))
    assert len(both.accepted) == max(len(one.accepted), len(other.accepted))
    share, tolerance = both.accepted[0] / both.n_steps, 2 / both.n_steps
    shares = sorted((one.accepted[0] / one.n_steps, other.accepted[0] / other.n_steps))
    assert shares[0] - tolerance <= share <= shares[1] + tolerance
