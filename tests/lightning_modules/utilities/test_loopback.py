"""Where the processes of a run on one machine meet."""

import os
import socket
from types import SimpleNamespace

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_modules.utilities.loopback import loopback


@pytest.fixture
def trainer(monkeypatch):
    for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    strategy = SimpleNamespace(cluster_environment=LightningEnvironment())
    return SimpleNamespace(num_nodes=1, world_size=2, strategy=strategy)


@pytest.mark.parametrize("address", [None, "192.0.2.1"])
def test_processes_meet_on_loopback(trainer, monkeypatch, address):
    if address is not None:
        monkeypatch.setenv("MASTER_ADDR", address)
    with loopback(trainer):
        environment = trainer.strategy.cluster_environment
        assert environment.main_address == "127.0.0.1"
        socket.create_connection(("127.0.0.1", int(os.environ["MASTER_PORT"]))).close()
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.2", int(os.environ["MASTER_PORT"])))
    assert os.environ.get("MASTER_ADDR") == address


def test_processes_that_are_started_by_something_else_meet_where_it_decides(trainer, monkeypatch):
    before = {"LOCAL_RANK": "0", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "1"}
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    with loopback(trainer):
        assert {name: os.environ[name] for name in before} == before


@pytest.mark.parametrize("port", ["abc", "99999", None])
def test_ports_that_cannot_be_used(trainer, monkeypatch, port):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = port or str(server.getsockname()[1])  # which is in use
        monkeypatch.setenv("MASTER_PORT", port)
        with pytest.raises(ValueError, match=f"`MASTER_PORT` = '{port}'"), loopback(trainer):
            pass
