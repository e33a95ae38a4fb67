# SPDX-License-Identifier: Apache-2.0
"""A report says what was compared, every name that failed, and one verdict."""

import io
import json

import pytest
from rich.console import Console

from vllm_megamoe_plugin.tools import sync_report
from vllm_megamoe_plugin.tools.sync_verdict import Report, Way

from .test_sync_verdict import COLD, COLD_SEEN, EXPECTATION, HOT, changed, step


def report(*ways: Way) -> Report:
    return Report(
        target="http://127.0.0.1:8000",
        checkpoint="/models/m",
        url="http://127.0.0.1:8000",
        vllm="0.32.0",
        served_with=None,
        ranks=["dp0", "dp1"],
        layers=3,
        cold=COLD_SEEN,
        expectation=EXPECTATION,
        first=step("identity"),
        ways=list(ways),
    )


def good(name: str) -> Way:
    return Way(name=name, steps=[step(s) for s in ("identity", "scramble", "restore")])


def stale(name: str) -> Way:
    state = changed(HOT, scale=COLD["dp1"]["scale"])
    steps = [step("identity"), step("scramble", state), step("restore")]
    return Way(name=name, steps=steps)


def unchecked(name: str) -> Way:
    return Way(name=name, unchecked="the workers did not join")


CASES = [
    ((good("direct"), good("transfer")), 0),
    ((good("direct"), stale("layerwise")), 1),
    ((good("direct"), unchecked("transfer")), 2),
    ((stale("direct"), unchecked("transfer")), 1),
]


@pytest.mark.parametrize(("ways", "code"), CASES)
def test_exit_code_and_verdict_agree_everywhere(ways, code: int) -> None:
    found = report(*ways)
    data = json.loads(json.dumps(sync_report.to_json(found), allow_nan=False))
    assert found.exit_code == data["exit_code"] == code
    out = io.StringIO()
    sync_report.show(found, Console(file=out, width=120))
    verdict = {0: "EQUAL", 1: "FAULT", 2: "NOT CHECKED"}[code]
    assert out.getvalue().splitlines()[-1].startswith(verdict)
    markdown = sync_report.to_markdown(found, "vllm-megamoe sync-check m")
    assert f"**{verdict}" in markdown
    for line in (*found.faults(), *found.unchecked()):
        assert line in out.getvalue()
        assert f"* {line}\n" in markdown


def test_json_has_figures_per_way_rank_and_step() -> None:
    data = sync_report.to_json(report(good("direct"), stale("layerwise")))
    assert data["versions"]["vLLM"] == "0.32.0"
    assert data["tensors"] == 14
    assert data["expected"] == 8
    direct, layerwise = data["ways"]["direct"], data["ways"]["layerwise"]
    assert direct["verdict"] == "equal"
    assert direct["reasons"] == []
    assert direct["changed"] == 8
    assert direct["restored"] == 14
    assert direct["steps"]["restore"]["seconds"] == 0.5
    assert layerwise["verdict"] == "fault"
    assert layerwise["ranks"]["dp0"]["changed"] == 4
    assert layerwise["ranks"]["dp1"]["changed"] == 3
    assert layerwise["steps"]["scramble"]["did_not_change"] == ("dp1:scale",)
    assert "did not change" in layerwise["reasons"][0]


def test_table_has_a_row_per_way_and_rank() -> None:
    out = io.StringIO()
    sync_report.show(report(good("direct"), stale("layerwise")), Console(file=out))
    rows = [line.split() for line in out.getvalue().splitlines()]
    assert ["direct", "dp0", "4/4", "7/7", "0", "restored"] in rows
    assert ["layerwise", "dp1", "3/4", "7/7", "0", "restored"] in rows


def test_markdown_says_what_was_run_and_every_name_that_failed() -> None:
    found = report(good("direct"), stale("layerwise"), unchecked("transfer"))
    found.served_with = ["vllm-megamoe", "serve", "m", "-tp", "2"]
    found.ways[1].aftermath = "The real weights were put back."
    text = sync_report.to_markdown(found, "vllm-megamoe sync-check m -- -tp 2")
    assert "`vllm-megamoe sync-check m -- -tp 2`" in text
    assert "`vllm-megamoe serve m -tp 2`" in text
    assert "| layerwise | dp1 | 7 | 4 | 3 | 7 | 0 | restored |" in text
    assert "## Every name that failed\n\n* `dp1:scale`" in text
    assert "* transfer: the workers did not join" in text
    assert "* layerwise: The real weights were put back." in text
