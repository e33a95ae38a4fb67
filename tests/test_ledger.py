# SPDX-License-Identifier: Apache-2.0
"""The ledger names what is missing, and a layer with holes does not serve."""

import pytest

from vllm_megamoe_plugin.ledger import Ledger, summarize

from .helpers import PREFIX


def _ledger() -> Ledger:
    ledger = Ledger(PREFIX)
    ledger.require("a", 2, "expert {}".format)
    ledger.require("b", 1, "expert {}".format)
    return ledger


def test_ledger_names_missing_and_duplicate_slots() -> None:
    ledger = _ledger()
    assert ledger.missing() == ["a: expert 0", "a: expert 1", "b: expert 0"]
    for _ in range(300):
        ledger.mark("a", 1, planned=False)
    assert ledger.missing() == ["a: expert 0", "b: expert 0"]
    assert ledger.duplicates() == ["a: expert 1"]
    assert ledger.holes("a") == [0]


def test_many_slots_are_marked_as_one_by_one() -> None:
    ledger, other = _ledger(), _ledger()
    for times in range(300):
        slots = slice(0, 2) if times % 2 else slice(1, 2)
        ledger.mark_all("a", slots)
        for slot in range(2)[slots]:
            other.mark("a", slot, planned=False)
        assert ledger._loads == other._loads
        assert (ledger.missing(), ledger.duplicates()) == (
            other.missing(),
            other.duplicates(),
        )
    ledger.accept()
    assert not ledger.dirty
    ledger.mark_all("a", slice(0, 0))
    ledger.mark_all("b", slice(0, 1))
    assert ledger.dirty
    # what else a bare load wrote cannot be known
    assert not ledger.alone


def test_a_planned_load_restarts_its_slot() -> None:
    ledger = _ledger()
    for planned in (False, True, False):
        ledger.mark("a", 0, planned=planned)
    assert ledger.duplicates() == []
    assert ledger.missing() == ["a: expert 1", "b: expert 0"]


def test_a_layer_serves_only_after_it_was_accepted() -> None:
    ledger = _ledger()
    message = f"{PREFIX}: the experts are incomplete .* 3 slots are missing"
    with pytest.raises(RuntimeError, match=message):
        ledger.check_ready()
    ledger.accept()
    ledger.check_ready()
    ledger.mark("b", 0, planned=False)
    with pytest.raises(RuntimeError, match="post-load processing has not run"):
        ledger.check_ready()
    ledger.accept()
    ledger.begin_update()
    ledger.mark("b", 0, planned=False)
    with pytest.raises(RuntimeError, match=r"2 slots .*\(a: expert 0; a: expert 1\)"):
        ledger.check_ready()


def test_planning_does_not_stop_a_layer_from_serving() -> None:
    ledger = _ledger()
    ledger.accept()
    ledger.mark("a", 0, planned=True)
    ledger.check_ready()


def test_kept_slots_count_as_loaded_once() -> None:
    ledger = _ledger()
    ledger.accept()
    ledger.begin_update(keeps=lambda label: label == "expert 1")
    assert ledger.missing() == ["a: expert 0", "b: expert 0"]
    ledger.mark("a", 1, planned=False)
    assert ledger.duplicates() == ["a: expert 1"]
    ledger.begin_update()
    assert ledger.duplicates() == []
    assert len(ledger.missing()) == 3


def test_what_a_layer_needs_to_be_repaired() -> None:
    ledger = _ledger()
    assert not ledger.alone
    ledger.accept()
    ledger.begin_update(alone=True)
    ledger.mark("a", 0, planned=False)
    assert ledger.alone
    ledger.begin_update()
    assert not ledger.alone
    ledger.accept()
    ledger.mark("a", 0, planned=False)
    assert not ledger.alone


def test_summaries_stop_after_six() -> None:
    assert summarize(list("ab")) == "a; b"
    assert summarize(list("abcdefgh")) == "a; b; c; d; e; f and 2 more"


def test_a_known_failure_is_told_until_another_update_begins() -> None:
    ledger = Ledger("layers.0")
    ledger.begin_update()
    ledger.failure = "the trainer is gone"
    with pytest.raises(RuntimeError, match=r"^layers.0: the trainer is gone$"):
        ledger.check_ready()
    ledger.begin_update()
    with pytest.raises(RuntimeError, match="do not serve"):
        ledger.check_ready()
    ledger.failure = "again"
    ledger.accept()
    ledger.check_ready()
