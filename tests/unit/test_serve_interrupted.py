"""Ctrl-C before a server has begun to serve."""

import os
import signal
import sys
from pathlib import Path

import pytest
from interrupts import interrupted_at
from placement_records import served

from oallama.core.errors import DeviceError
from oallama.report.placement import Served
from oallama.serve.server import Placements, listen, serve
from oallama.serve.supervisor import Launch


@pytest.mark.filterwarnings("error:coroutine:RuntimeWarning")
def test_a_ctrl_c_anywhere_before_it_serves_ends_it_without_a_word() -> None:
    """Until llama-server is to be started, which fails here. Of a coroutine that is never awaited Python would warn."""

    def launch(_served: Served, _socket: Path) -> Launch:
        raise DeviceError("not to be started")

    def work() -> None:
        with pytest.raises(DeviceError, match="not to be started"):
            serve(sock, None, Placements(served(), None, launch), talk=print)

    with listen("127.0.0.1", 0, None) as sock:
        work()
        moment = 0
        while interrupted_at(moment := moment + 1, work):
            pass
    assert moment > 100


def test_after_a_ctrl_c_llama_server_is_not_started(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    started = tmp_path / "started"

    def launch(_served: Served, _socket: Path) -> Launch:
        signal.raise_signal(signal.SIGINT)
        return Launch((sys.executable, "-c", f"open({str(started)!r}, 'w')"), dict(os.environ), uses_device=False)

    with listen("127.0.0.1", 0, None) as sock, pytest.raises(KeyboardInterrupt):
        serve(sock, None, Placements(served(), None, launch), talk=print)
    assert not started.exists()
    assert (caplog.text, *capfd.readouterr()) == ("", "", "")
