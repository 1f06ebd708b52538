"""Requests to the Hugging Face hub from a machine without a network."""

import io
import logging
from types import SimpleNamespace

import pytest
from huggingface_hub import close_session, constants, get_session, hf_hub_download, set_client_factory

from longce.cli import hub


@pytest.fixture
def online(monkeypatch):
    """A process that may use the hub; afterwards the client is the default one again."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    client = get_session()
    make, hooks = type(client), client.event_hooks
    yield
    set_client_factory(lambda: make(event_hooks=hooks, follow_redirects=True, timeout=None))
    close_session()


def test_a_hub_that_cannot_be_reached_is_tried_once_more_and_then_the_cache_is_used(
    online, monkeypatch, caplog, tmp_path
):
    attempts, waits = [], []

    def fail(address, timeout):
        attempts.append(address)
        raise OSError("Name or service not known")

    monkeypatch.setattr(hub.socket, "create_connection", fail)
    monkeypatch.setattr(hub.time, "sleep", waits.append)
    hub.configure_hub()
    with caplog.at_level(logging.WARNING):
        for name in ("nobody/nothing", "nobody/other"):
            with pytest.raises(OSError, match="cannot find"):
                hf_hub_download(name, "config.json", cache_dir=tmp_path)
    assert set(attempts) == {("huggingface.co", 443)}
    assert waits == [hub._RETRY_SECONDS]
    assert not caplog.records


def test_an_address_is_checked_once_and_not_behind_a_proxy(online, monkeypatch):
    attempts = []
    monkeypatch.setattr(hub.socket, "create_connection", lambda address, **_: attempts.append(address) or io.BytesIO())
    hub.configure_hub()
    check = get_session().event_hooks["request"][-1]
    request = SimpleNamespace(url=SimpleNamespace(host="huggingface.co", port=None, scheme="https"))
    check(request)
    check(request)
    assert attempts == [("huggingface.co", 443)]
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # it finds names that this machine cannot
    check(SimpleNamespace(url=SimpleNamespace(host="other", port=None, scheme="https")))
    assert len(attempts) == 1
