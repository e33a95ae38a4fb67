# SPDX-License-Identifier: Apache-2.0
"""Two data-parallel replicas: each rank answers, and one API server knows of all."""

from pathlib import Path

import pytest

from vllm_megamoe_plugin.sync.sender import Server, ServerError

from ..serving import ARITH, serve

pytestmark = pytest.mark.serve


def test_every_rank_of_every_replica_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    options = ["-dp", "2", "--enable-expert-parallel", "--enforce-eager"]
    with serve(ARITH / "nvfp4", tmp_path, *options) as running:
        server = Server(running.url, 120)
        before = running.complete("1 + 1 =", max_tokens=8)
        states = server.rpc("megamoe_state")
        assert [s["incomplete"] for s in states] == [None, None]
        ranks = {s["rank"] for s in states}
        assert {rank.partition("_")[0] for rank in ranks} == {"dp0", "dp1"}
        loaded = server.rpc("megamoe_load", path=str(ARITH / "nvfp4"))
        assert {x["rank"] for x in loaded} == ranks
        digests = server.rpc("megamoe_digests")
        assert {key.partition(":")[0] for d in digests for key in d} == ranks
        server.post("/reset_prefix_cache")
        assert running.complete("1 + 1 =", max_tokens=8)["text"] == before["text"]
        # replicas that are idle go on stepping for a while unless they are paused
        server.post("/pause?mode=wait")
        server.post("/weight_checker", {"action": "reset"})
        # whichever API server answers knows of it, because there is one
        for _ in range(4):
            with pytest.raises(ServerError, match=r"503: .*reset the weights to zero"):
                server.get("/health")
        assert all(s["incomplete"] for s in server.rpc("megamoe_state"))
        server.rpc("megamoe_load", path=str(ARITH / "nvfp4"))
        server.post("/reset_prefix_cache")
        server.post("/resume")
        assert running.complete("1 + 1 =", max_tokens=8)["text"] == before["text"]
