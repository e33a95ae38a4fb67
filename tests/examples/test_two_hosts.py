# SPDX-License-Identifier: Apache-2.0
"""Two network namespaces, one server: answers, a sync of both, and one host lost."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _left_behind() -> list[str]:
    """Processes that the script, or a host of it, started."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if b"TWO_HOSTS_INSIDE=" in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_bytes().decode())
        except OSError:
            continue
    return found


@pytest.mark.serve
def test_two_hosts_sync_whole_or_refuse(tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "two_hosts.py")
    done = subprocess.run(
        [sys.executable, script, "--json", "--logs", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    logs = "\n".join(
        "\n".join(log.read_text().splitlines()[-20:]) for log in tmp_path.glob("*.log")
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{logs}"
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["faults"] == []
    ranks = found["sync_check"]["ranks"]
    assert [rank.partition("_")[0] for rank in ranks] == ["dp0", "dp1"]
    for way in found["sync_check"]["ways"].values():
        assert way["verdict"] == "equal"
        assert [way["ranks"][rank]["changed"] > 0 for rank in ranks] == [True, True]
    assert found["lost"]["answered"] == []
    assert len(found["lost"]["refusals"]) == 3
    assert found["restored"]
    # a killed process takes a moment to go
    deadline = time.monotonic() + 60
    while _left_behind():
        assert time.monotonic() < deadline, _left_behind()
        time.sleep(0.2)
