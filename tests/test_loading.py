"""Drafters that cannot be had, or that a later release wrote: the message says which and what to do."""

import json

import httpx
import pytest
from huggingface_hub.errors import GatedRepoError
from kit import tiny_drafter, tiny_target

from hf_dflow import DFlowDrafter, DrafterConfigError


@pytest.mark.parametrize("status", [401, 403])
def test_gated_repository(monkeypatch, status):
    """F3: a stack of HTTP errors, from which nobody learns that access must be asked for and a token given."""

    def refuse(*args, **kwargs):
        response = httpx.Response(status, request=httpx.Request("GET", "https://example.org/config.json"))
        raise GatedRepoError("Access to model org/drafter is restricted.", response=response)

    monkeypatch.setattr("transformers.utils.hub.hf_hub_download", refuse)
    with pytest.raises(OSError, match="gated") as error:
        DFlowDrafter.from_pretrained("org/drafter")
    assert "org/drafter" in str(error.value) and "token" in str(error.value)


def test_format_of_a_later_release(tmp_path):
    """F4: keys of a format that this release does not know, ignored."""
    tiny_drafter(tiny_target()).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "format_version": config["format_version"] + 1}))
    with pytest.raises(DrafterConfigError, match="format_version 2 is newer"):
        DFlowDrafter.from_pretrained(tmp_path)
