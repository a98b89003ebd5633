"""Who may connect to a worker: the process that it works for, the descendants of that, and nobody else of the machine.

ggml's RPC protocol has no password, and whoever is served reads and writes the server's memory. So connections are
accepted here in ggml's stead (native/accept.cpp), at once and while it serves another, and ggml gets those whose other
end is a socket that such a process has open, as /proc says. All others are closed without a byte. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import socket
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from ggml_bridge.threads import Thread

_AcceptFunction = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)

_PAUSE_S = 0.1

# of the kernel's headers, as the rest of netlink's numbers below
_ESTABLISHED = 1  # TCP_ESTABLISHED
_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST = 1
_ANY = 0xFFFFFFFF  # a socket in any state
_INODE_AT = 84  # bytes of struct nlmsghdr and of struct inet_diag_msg before idiag_inode


class ConnectionGuard:
    """Accepts the connections of this process' RPC server for as long as the process lives."""

    def __init__(self, parent: int) -> None:
        """parent: the process that may connect, and its descendants."""
        self._parent = parent
        self._let_in: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self._listening = False
        self._function = _AcceptFunction(self._next)

    def install(self) -> bool:
        """Stand between the kernel and ggml, before ggml listens. False, and nothing is done, where who connects cannot
        be told: libggml_accept was not preloaded, or the system does not say."""
        accept_with = getattr(ctypes.CDLL(None), "ggml_accept_with", None)
        if accept_with is None or not can_tell(self._parent):
            return False
        accept_with(self._function)
        return True

    def _next(self, listener: int) -> int:
        """The next connection that may be served; ggml asks for it when it is done with the one before. -1, with which
        ggml stops serving, where there is no thread to be had that accepts any."""
        if not self._listening:
            try:
                own = socket.socket(fileno=os.dup(listener))
                Thread(target=self._accept, args=(own,), daemon=True).start()
            except (OSError, RuntimeError, MemoryError):
                return -1
            self._listening = True
        return self._let_in.get().detach()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
                if is_of(connection, self._parent):
                    self._let_in.put(connection)
                else:
                    connection.close()
            except (OSError, MemoryError):  # no descriptor or memory for it now
                time.sleep(_PAUSE_S)


def can_tell(parent: int) -> bool:
    """Whether the system says who connects: tried with a connection of this process to itself."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        next(_descriptors(parent), None)
        with (
            socket.create_server(("127.0.0.1", 0)) as listener,
            socket.create_connection(listener.getsockname()),
            listener.accept()[0] as accepted,
        ):
            return is_of(accepted, os.getpid())
    except OSError:
        return False


def is_of(connection: socket.socket, parent: int) -> bool:
    """Whether this process, `parent` or a descendant of it holds the other end of a connection within this machine."""
    try:
        inode = _peer_inode(connection)
        held = inode != 0 and any(_holds(pid, inode) for pid in _family(parent))
        # the other end was this one all the time: no other connection has its two addresses as long as it stands
        return held and connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _ESTABLISHED
    except OSError:
        return False


def _peer_inode(connection: socket.socket) -> int:
    """The inode of the socket at the other end; 0 where no process of this machine has it. Asks the kernel for that one
    socket (sock_diag(7)): reading /proc/net/tcp takes milliseconds."""
    (peer, peer_port), (own, own_port) = connection.getpeername(), connection.getsockname()
    wanted = struct.pack(
        ">BBHIHH4s12x4s12xIq",  # struct inet_diag_req_v2
        *(socket.AF_INET, socket.IPPROTO_TCP, 0, _ANY, peer_port, own_port),
        *(socket.inet_aton(peer), socket.inet_aton(own), 0, -1),
    )
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.send(struct.pack("=IHHII", 16 + len(wanted), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 0, 0) + wanted)
        answer = kernel.recv(4096)
    if struct.unpack_from("=4xH", answer)[0] != _SOCK_DIAG_BY_FAMILY:
        return 0  # there is no such socket, or the kernel tells nobody
    inode: int = struct.unpack_from("=I", answer, _INODE_AT)[0]
    return inode


def _family(parent: int) -> Iterator[int]:
    """`parent`, this process, and the descendants of `parent`, which are looked for only when they are asked for."""
    yield parent
    yield os.getpid()
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                stat = (folder / "stat").read_text(errors="replace")
            except OSError:
                continue  # it ended meanwhile
            children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(folder.name))
    found = list(children.get(parent, []))
    for pid in found:
        found += children.get(pid, [])
    yield from found


def _holds(pid: int, inode: int) -> bool:
    try:
        return f"socket:[{inode}]" in _descriptors(pid)
    except OSError:
        return False


def _descriptors(pid: int) -> Iterator[str]:
    """What the descriptors of a process are. Raises OSError where that is not for us to know."""
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            yield str(descriptor.readlink())
