"""The address of llama-server: its choice, its access rules, and requests to it."""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from oallama.core.errors import DeviceError, UsageError

MOST_BYTES = 1 << 20  # of an answer that we read


@dataclass(frozen=True, slots=True)
class Address:
    """Where llama-server listens. host: numeric. api_key: key that requests must send; None: no key."""

    host: str
    port: int
    api_key: str | None = None

    @property
    def local_host(self) -> str:
        """Its address on this machine."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)

    @property
    def url(self) -> str:
        host = f"[{self.local_host}]" if ":" in self.host else self.local_host
        return f"http://{host}:{self.port}"

    def is_healthy(self, pid: int, timeout_s: float) -> bool:
        """Whether the process answers at /health, which needs no key."""
        return self._get("/health", {}, pid, timeout_s) is not None

    def metrics(self, pid: int, timeout_s: float) -> str | None:
        """The text of /metrics of the process; None if it does not answer in time."""
        headers = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        return self._get("/metrics", headers, pid, timeout_s)

    def _get(self, path: str, headers: Mapping[str, str], pid: int, timeout_s: float) -> str | None:
        """The body of a successful answer; None otherwise. Sends the request only if this process owns the port."""
        connection = http.client.HTTPConnection(self.local_host, self.port, timeout=timeout_s)
        try:
            if not listens(pid, self.port):
                return None
            connection.connect()
            if not listens(pid, self.port):  # it does not begin to listen twice: the connection is with it, or it ended
                return None
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            return answer.read(MOST_BYTES).decode(errors="replace") if answer.status == 200 else None
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()


@contextlib.contextmanager
def reserved_address(host: str, port: int, api_key: str | None, option: str = "--port") -> Iterator[Address]:
    """Choose the address on which a program will listen, and reserve it inside the block; port 0: any free port. The
    program must set SO_REUSEADDR, as servers do. option: the option that sets the port. Raises UsageError for an
    address that other machines can reach without a key, or an address of another machine; DeviceError if it is in
    use."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError):
        raise UsageError(f"--host {host} is not an address of this machine; use e.g. 127.0.0.1") from None
    if api_key is None and not is_local(str(address[0])):
        raise UsageError(
            f"--host {host} is open to other machines; set --api-key KEY (or OALLAMA_API_KEY) for them to send"
        )
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        try:
            # a given port may have connections that closed a moment ago; without this the system takes no reserved port
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, port != 0)
            sock.bind(address)
            # the program may bind it, as we do not listen
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, True)
        except OSError as error:
            raise DeviceError(f"cannot listen on {host}:{port}: {error.strerror}; choose another {option}") from None
        yield Address(str(address[0]), int(sock.getsockname()[1]), api_key)


def listens(pid: int, port: int) -> bool:
    """True if this process listens on a port."""
    import psutil

    try:
        found = psutil.Process(pid).net_connections("tcp")
    except psutil.Error:
        return False
    return any(one.status == psutil.CONN_LISTEN and one.laddr.port == port for one in found)


def is_local(name: str) -> bool:
    """True for a name or address that always means this machine. Names are not looked up, as a website can point its
    own name at this machine (DNS rebinding)."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def host_name(host: str) -> str:
    """The name in a Host header, without its port and brackets."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
