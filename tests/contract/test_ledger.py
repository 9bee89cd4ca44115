"""The ledger's arithmetic: whatever happens to its writer, each second is charged once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sgpu.contract.ledger import Category, Ledger, parts

_SECOND = 1_000_000_000
_categories = st.sampled_from(Category)
_pauses = st.integers(0, 10**13)
_actions = st.one_of(
    st.tuples(st.just("turn"), _categories, _pauses),
    st.tuples(st.just("lapse"), _categories, _pauses),
    st.tuples(st.just("close"), _categories, _pauses),
)


@given(st.lists(_actions, max_size=30), st.integers(0, 10**13))
def test_parts_are_the_whole_without_the_pauses(actions: list[tuple[str, Category, int]], heard_ago: int) -> None:
    now = 1_000 * _SECOND
    born, open_ns = now, 0
    ledger = Ledger(Category.STARTING, born, born, [0.0] * len(Category), closed=False)
    for name, category, pause in actions:
        now += pause
        open_ns += 0 if ledger.closed else pause
        if name == "turn":
            ledger.turn(category, now)
        elif name == "lapse":
            ledger.lapse(now, heard_ns=now - heard_ago, rest=category)
        else:
            ledger.close(now)
    found = parts(
        ledger.seconds, ledger.category, since_ns=ledger.since_ns, until_ns=now, closed=ledger.closed
    )  # fmt: skip
    assert min(found.values()) >= 0
    assert abs(sum(found.values()) - open_ns / _SECOND) < 1e-3


def test_what_was_not_heard_of_is_the_rest() -> None:
    ledger = Ledger(Category.PRODUCTIVE, 0, 0, [0.0] * len(Category), closed=False)
    ledger.lapse(10 * _SECOND, heard_ns=4 * _SECOND, rest=Category.RESTARTING)
    assert (ledger.seconds[Category.PRODUCTIVE], ledger.seconds[Category.RESTARTING]) == (4.0, 6.0)
    assert ledger.category is Category.RESTARTING


def test_a_clock_that_is_not_ours_charges_nothing() -> None:
    """Another machine's, or this one's before it was started anew."""
    ledger = Ledger(Category.PRODUCTIVE, 900 * _SECOND, 0, [0.0] * len(Category), closed=False)
    ledger.turn(Category.DATA, 5 * _SECOND)
    assert sum(ledger.seconds) == 0
    assert ledger.since_ns == 5 * _SECOND
