"""n_g between the lengths of a plan's table: the split back end (tests/native/split_test_tokens.cpp) has the same."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from oallama.place.cutting import n_g_at
from oallama.place.memory import most_n_g


def test_between_two_lengths_the_cpu_gets_whole_groups_of_tokens() -> None:
    table = ((16, 3), (48, 20), (50, 15))
    assert [n_g_at(table, n) for n in (15, 16, 17, 19, 32, 48, 49, 50)] == [0, 3, 1, 3, 12, 20, 17, 15]
    assert n_g_at(((8, 0), (16, 15)), 12) == 8 and n_g_at(((8, 7), (16, 15)), 12) == 11, "one token is a group"
    assert n_g_at((), 512) == 0


@given(
    st.lists(st.tuples(st.integers(1, 600), st.floats(0, 1)), min_size=1, max_size=6, unique_by=lambda one: one[0]),
    st.integers(1, 1200),
)
def test_no_batch_has_more_tokens_on_the_device_than_memory_is_kept_for(
    points: list[tuple[int, float]], n_ubatch: int
) -> None:
    table = tuple((n, int(share * n)) for n, share in sorted(points))
    most = most_n_g(table, n_ubatch)
    assert all(0 <= n_g_at(table, n) <= min(n, most) for n in range(1, n_ubatch + 1))
