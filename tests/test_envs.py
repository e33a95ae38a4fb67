# SPDX-License-Identifier: Apache-2.0
"""Environment variables: strict spellings, latched on first read."""

import re

import pytest

from vllm_megamoe_plugin import envs

variables = pytest.mark.parametrize("name", envs.VARIABLES)


@variables
def test_default_is_the_first_accepted_value(name: str) -> None:
    assert envs.get(name) == envs.VARIABLES[name][0][0]


@variables
def test_every_listed_value_is_accepted(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in envs.VARIABLES[name][0]:
        monkeypatch.setenv(name, value)
        envs.get.cache_clear()
        assert envs.get(name) == value


@variables
@pytest.mark.parametrize("value", ["", "true", "AUTO", " 1", "yes"])
def test_any_other_spelling_is_refused_and_the_right_ones_listed(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    accepted = ", ".join(envs.VARIABLES[name][0])
    message = f"{name}={value!r} is not accepted"
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        envs.get(name)
    assert str(error.value).endswith(f"Use one of: {accepted}.")


@variables
def test_latched_on_first_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = envs.get(name)
    monkeypatch.setenv(name, envs.VARIABLES[name][0][-1])
    assert envs.get(name) == first
    monkeypatch.setenv(name, "nonsense")
    assert envs.get(name) == first


def test_at_most_six_with_our_prefix() -> None:
    assert 1 <= len(envs.VARIABLES) <= 6
    assert all(name.startswith("VLLM_MEGAMOE_") for name in envs.VARIABLES)
