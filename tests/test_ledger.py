# SPDX-License-Identifier: Apache-2.0
"""The ledger names what is missing, and a layer with holes does not serve."""

import pytest

from vllm_megamoe_plugin.ledger import Ledger, summarize

from .helpers import PREFIX


def _ledger() -> Ledger:
    ledger = Ledger(PREFIX)
    ledger.require("a", ["expert 0", "expert 1"])
    ledger.require("b", ["expert 0"])
    return ledger


def test_ledger_names_missing_and_duplicate_slots() -> None:
    ledger = _ledger()
    assert ledger.missing() == ["a: expert 0", "a: expert 1", "b: expert 0"]
    for _ in range(300):
        ledger.mark("a", 1, planned=False)
    assert ledger.missing() == ["a: expert 0", "b: expert 0"]
    assert ledger.duplicates() == ["a: expert 1"]
    assert ledger.holes("a") == [0]


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


def test_summaries_stop_after_six() -> None:
    assert summarize(list("ab")) == "a; b"
    assert summarize(list("abcdefgh")) == "a; b; c; d; e; f and 2 more"
