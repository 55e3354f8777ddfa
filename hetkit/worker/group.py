"""The process group: a store on loopback, the ranks' default group, the engine's own."""

import os
import re
import socket
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

LOOPBACK = "127.0.0.1"

_GLOO_SOURCE = re.compile(r"gloo/[\w/]+\.(?:cc|h):\d+")
"""How gloo's own errors begin: with the place in its source. Their type is a plain RuntimeError."""


def host_store() -> TCPStore:
    """Hosts the rendezvous store on a free port of the loopback interface.

    The port is bound here and handed over: nobody chooses a free port and hopes, and no other
    interface can reach the store (by itself, TCPStore listens on all of them).
    """
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    return TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def join_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """Connects to rank 0's store."""
    return TCPStore(
        host,
        port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )


def join_group(
    store: TCPStore, *, backend: str, rank: int, world_size: int, timeout_s: float
) -> dist.ProcessGroup:
    """Makes the default process group and returns a second one, for the exchange engine alone."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback_interface())
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    group = dist.new_group(timeout=timeout)
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"new_group gave {group!r}")
    return group


def leave_group() -> None:
    """Destroys the process groups, if there are any."""
    if dist.is_initialized():
        dist.destroy_process_group()


def share_tensors(tensors: list[torch.Tensor], source: int) -> None:
    """Gives all ranks the tensors of rank ``source``, in place."""
    with torch.no_grad():
        for tensor in tensors:
            whole = tensor.detach().contiguous()  # its own memory, or a copy if it has gaps
            dist.broadcast(whole, src=source)
            if whole.data_ptr() != tensor.data_ptr():
                tensor.copy_(whole)


def is_peer_loss(error: BaseException) -> bool:
    """Tells whether a collective failed: another rank is gone or has given up.

    Wherever it was raised: in the exchange, in DDP's own collectives, or in the user's code.

    Example:
        >>> is_peer_loss(RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection reset by peer"))
        True
        >>> is_peer_loss(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
        False
    """
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and _GLOO_SOURCE.search(str(error)) is not None


def _loopback_interface() -> str:
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == LOOPBACK for address in addresses):
            return str(name)
    return "lo"
