# SPDX-License-Identifier: Apache-2.0
"""One thread, one seed per test, no deadline, no environment variable from outside."""

import zlib
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from vllm_megamoe_plugin import envs

torch.set_num_threads(1)
# how long an example takes says nothing about the code
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def _seed(request: pytest.FixtureRequest) -> None:
    torch.manual_seed(zlib.crc32(request.node.name.encode()))


@pytest.fixture(autouse=True)
def _fresh_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in envs.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    envs.get.cache_clear()
    yield
    envs.get.cache_clear()
