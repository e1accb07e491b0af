"""The one-rank process group: private, without a network, and only what it created is destroyed."""

import logging
import os
import signal
import sys
import threading

import pytest
import torch
import torch.distributed as dist

from tiered_zero.errors import ModelError
from tiered_zero.hardware.ranks import launcher
from tiered_zero.hardware.ranks.collectives import Collectives, agree, ensure_many


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for key in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(key, raising=False)
    if dist.is_initialized():  # an engine's, earlier in this process
        dist.destroy_process_group()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_scripts_that_ask_for_their_rank_go_on(caplog):
    caplog.set_level(logging.INFO, "tiered_zero")
    hook = sys.excepthook
    collectives = Collectives()
    collectives.open()
    assert not caplog.records, "nothing that a user has to know"
    assert sys.excepthook is hook, "a traceback of one rank has no [rank0] before it"
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1) == (collectives.rank, collectives.world_size)
    ones = torch.ones(3)
    dist.all_reduce(ones)
    assert torch.equal(ones, torch.ones(3))
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    collectives.close()
    collectives.close()
    assert not dist.is_initialized()


def test_it_can_be_made_again_and_the_users_interface_stays(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    for _ in range(2):
        collectives = Collectives(True)
        collectives.open()
        assert dist.is_initialized() and os.environ["GLOO_SOCKET_IFNAME"] == "lo"
        collectives.close()


def test_not_required_creates_none():
    collectives = Collectives(dist_init_required=False)
    collectives.open()
    assert not dist.is_initialized()
    collectives.close()


def test_an_existing_group_is_respected_and_left():
    first, second = Collectives(), Collectives()
    first.open()
    second.open()
    second.close()
    assert dist.is_initialized()
    first.close()


def test_more_ranks_are_refused(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    with pytest.raises(ModelError, match=r"one rank; torch.distributed's group has 4"):
        Collectives().open()
    monkeypatch.undo()
    monkeypatch.setenv("WORLD_SIZE", "2")
    for required in (None, False, True):
        with pytest.raises(ModelError, match=r"one rank; the launcher's WORLD_SIZE has 2"):
            Collectives(required).open()
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("world_size", "rank", "text"),
    [
        ("two", "0", "WORLD_SIZE was expected as a number of ranks, from 1; found 'two'"),
        ("0", "0", "WORLD_SIZE was expected as a number of ranks, from 1; found '0'"),
        ("2", "2", "RANK was expected from 0 to 1, as WORLD_SIZE is 2; found '2'"),
        ("2", "-1", "RANK was expected from 0 to 1, as WORLD_SIZE is 2; found '-1'"),
    ],
)
def test_a_wrong_environment_is_refused(monkeypatch, world_size, rank, text):
    for key, value in (("WORLD_SIZE", world_size), ("RANK", rank), ("MASTER_ADDR", "::1"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(key, value)
    with pytest.raises(ModelError, match=text):
        ensure_many(1.0)
    assert not dist.is_initialized()


def test_one_rank_of_a_launcher_is_fine(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    collectives = Collectives()
    collectives.open()
    assert dist.is_initialized()
    collectives.close()


def test_a_failure_is_one_line_and_no_more(monkeypatch, caplog):
    def refuse(*args, **kwargs):
        raise RuntimeError("no interface")

    monkeypatch.setattr(dist, "init_process_group", refuse)
    collectives = Collectives()
    with caplog.at_level(logging.WARNING, "tiered_zero"):
        collectives.open()
    [record] = caplog.records
    assert "no interface" in record.getMessage()
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    collectives.close()


def test_a_signal_ends_the_wait_for_ranks_that_never_come(monkeypatch):
    """In torch's own wait no handler of Python's runs, not for Ctrl-C either."""
    for key, value in (("WORLD_SIZE", "2"), ("RANK", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(key, value)
    ended = threading.Event()

    def wait_for_others(*_, **__):
        assert threading.current_thread() is not threading.main_thread()
        os.kill(os.getpid(), signal.SIGINT)
        ended.wait(300)

    monkeypatch.setattr(dist, "init_process_group", wait_for_others)
    with pytest.raises(KeyboardInterrupt):
        ensure_many(1800.0)
    ended.set()


def test_gloo_takes_the_interface_that_leads_to_the_first_host(monkeypatch):
    seen = []
    for address, local in (("127.0.0.1", "1"), ("", "1"), ("127.0.0.1", "2")):
        for key, value in (("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", local), ("MASTER_ADDR", address)):
            monkeypatch.setenv(key, value)
        with launcher.network_interface():
            seen.append(os.environ.get("GLOO_SOCKET_IFNAME"))
        assert "GLOO_SOCKET_IFNAME" not in os.environ
    assert seen == ["lo", None, "lo"]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    with launcher.network_interface():
        assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


def test_an_interrupt_in_an_exchange_ends_the_run_on_every_rank(monkeypatch):
    failures = []

    def interrupted(*_arguments):
        raise KeyboardInterrupt

    ranks = Collectives()
    monkeypatch.setattr(Collectives, "world_size", 2)
    monkeypatch.setattr(Collectives, "exchange", interrupted)
    monkeypatch.setattr(Collectives, "fail", lambda _ranks, message: failures.append(message))
    with pytest.raises(KeyboardInterrupt):
        agree(ranks, "a call", lambda: 1)
    assert failures == ["a call: KeyboardInterrupt"]
