import socket
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist

from hetkit.worker.group import LOOPBACK, host_store, is_peer_loss, join_store


@pytest.fixture(scope="module", autouse=True)
def _libuv_stands():
    host_store()  # the first store of a process opens libuv's one signal pipe, which stays


def test_the_store_listens_on_loopback_alone_and_serves_who_joins():
    host = host_store()
    listening = [
        c.laddr.ip
        for c in psutil.Process().net_connections("tcp")
        if c.status == psutil.CONN_LISTEN and c.laddr.port == host.port
    ]
    assert listening == [LOOPBACK]
    guest = join_store(LOOPBACK, host.port, timeout_s=10.0)
    guest.set("word", "given")
    host.wait(["word"], timedelta(seconds=10))
    assert host.get("word") == b"given"


def test_two_stores_never_share_a_port():
    stores = [host_store() for _ in range(4)]
    assert len({store.port for store in stores}) == 4


def test_a_store_that_is_not_there_is_a_peer_that_is_lost():
    with socket.create_server((LOOPBACK, 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(dist.DistError) as caught:
        join_store(LOOPBACK, port, timeout_s=0.2)
    assert is_peer_loss(caught.value)


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/"


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError(GLOO + "pair.cc:553] Connection closed by peer [127.0.0.1]:44979"), True),
        (RuntimeError(GLOO + "pair.cc:537] Read error: Connection reset by peer"), True),
        (RuntimeError(GLOO + "unbound_buffer.cc:78] Timed out waiting 1800000ms for recv"), True),
        (dist.DistBackendError("NCCL error"), True),
        (dist.DistNetworkError("failed to recv"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ConnectionResetError("Connection reset by peer"), False),  # the user's own download, say
        (ValueError(GLOO + "pair.cc:1] quoted"), False),
    ],
    ids=str,
)
def test_a_peers_loss_is_told_from_the_users_errors(error, lost):
    assert is_peer_loss(error) is lost
