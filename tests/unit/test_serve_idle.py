"""Measuring when nobody asks anything: begun by itself, ended by a request, which is answered all the same."""

import asyncio
import contextlib
import sys
from dataclasses import dataclass, replace

import httpx
import placement_records as records
from idle_cases import MEASURES
from serving import Stub, ready, running, until

from oallama.serve.app import application
from oallama.serve.idle import Idle
from oallama.serve.tuning import Tune, Tuning

WON = replace(records.served(), reason="what won")
IDLE_S = 0.1


@dataclass
class Idling:
    stub: Stub
    supervisor: object
    tuning: Tuning
    client: httpx.AsyncClient
    taken: list

    def n_begun(self):
        began = self.stub.folder / "began"
        return len(began.read_text()) if began.exists() else 0

    async def get(self, path):
        return await self.client.get(path, timeout=60)


@contextlib.asynccontextmanager
async def idling(folder, idle_s=IDLE_S, replan=lambda: WON):
    """The application in front of a stand-in for llama-server, with a stand-in for `oallama tune`."""
    stub = Stub(folder)
    supervisor, taken = stub.supervisor("RPC0"), []
    tune = Tune((sys.executable, "-c", MEASURES, str(folder)), replan, idle_s)
    tuning = Tuning(tune, supervisor, lambda served: stub.launch("CUDA0"), taken.append, stub.said.append)
    app = Idle(application(supervisor, stub.proxy, records.served, tuning), supervisor, tuning)
    async with running(supervisor) as task:
        measuring = asyncio.create_task(app.tune(idle_s))
        try:
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
                yield Idling(stub, supervisor, tuning, client, taken), task
        finally:
            measuring.cancel()
            await tuning.end()


def test_after_a_while_without_a_request_it_is_measured_and_what_won_is_served(tmp_path):
    async def run():
        async with idling(tmp_path) as (server, task):
            await until(server.n_begun)
            assert server.supervisor.state.phase == "stopped"  # the device is needed
            (tmp_path / "enough").touch()
            await until(lambda: server.taken)
            await ready(server.supervisor, task)
            answer = await server.get("/v1/models")
            await asyncio.sleep(3 * IDLE_S)
            return server, answer.status_code

    server, status = asyncio.run(run())
    assert server.taken == [WON] and status == 200
    assert b"--device CUDA0" in server.stub.logged[-1]
    assert server.n_begun() == 1  # once is enough
    assert server.stub.said == ["no request for 0.1 s: measuring which placement is faster; a request ends it at once"]


def test_where_nothing_is_settled_it_measures_on_when_it_is_quiet_for_longer(tmp_path):
    found = [None, WON]

    async def run():
        (tmp_path / "enough").touch()
        async with idling(tmp_path, replan=lambda: found.pop(0)) as (server, _):
            await until(lambda: server.taken)
            return server

    server = asyncio.run(run())
    assert server.taken == [WON] and server.n_begun() == 2
    assert "nothing has won yet" in server.stub.said[1] and "no request for 0.2 s" in server.stub.said[2]


def test_a_request_ends_it_and_is_answered(tmp_path):
    async def run():
        async with idling(tmp_path) as (server, _):
            await until(server.n_begun)
            answers = await asyncio.gather(*(server.get("/v1/models") for _ in range(3)))
            kept = (tmp_path / "kept").exists()
            await until(lambda: server.n_begun() == 2)  # it goes on when it is quiet again
            return server, [answer.status_code for answer in answers], kept, replace(server.supervisor.state)

    server, statuses, kept, state = asyncio.run(run())
    assert statuses == [200, 200, 200] and kept
    assert server.taken == [] and state.restarts == 0
    assert "what was measured is kept" in server.stub.said[1]
    assert "no request for 0.2 s" in server.stub.said[2]  # not so soon again


def test_nothing_is_measured_while_a_request_is_being_answered(tmp_path):
    async def run():
        async with idling(tmp_path) as (server, _):
            slow = asyncio.create_task(server.get("/slow"))
            await until((tmp_path / "slow-began").exists)
            pid, n_begun = server.supervisor.state.pid, server.n_begun()  # it may have begun before the request came
            await asyncio.sleep(10 * IDLE_S)
            same = server.supervisor.state.pid == pid and server.n_begun() == n_begun
            slow.cancel()
            await asyncio.wait({slow})
            await until(lambda: server.n_begun() > n_begun)
            return same

    assert asyncio.run(run())


def test_who_only_looks_neither_ends_it_nor_holds_it_off(tmp_path):
    async def run():
        async with idling(tmp_path) as (server, _):
            while not server.n_begun():
                assert (await server.get("/health")).status_code in (200, 503)
                await server.get("/placement")
                await server.get("/metrics")
                await asyncio.sleep(IDLE_S / 10)
            looked = [await server.get(path) for path in ("/health", "/placement", "/metrics")]
            return [answer.status_code for answer in looked], (tmp_path / "kept").exists(), looked[1].json()["state"]

    statuses, ended, state = asyncio.run(run())
    assert statuses == [200, 200, 503] and not ended  # a request would be answered, so its health is good
    assert "measured which placement is faster" in state["said"]


def test_what_a_browser_asks_before_a_request_is_answered_and_is_none(tmp_path):
    """Anybody may ask it, so it must not end what is measured."""

    async def run():
        async with idling(tmp_path) as (server, _):
            await until(server.n_begun)
            asked = [
                await server.client.options("/v1/models", headers={"origin": origin})
                for origin in ("http://localhost:3000", "https://evil.example")
            ]
            return asked, (tmp_path / "kept").exists()

    (here, elsewhere), ended = asyncio.run(run())
    assert (here.status_code, elsewhere.status_code, ended) == (204, 204, False)
    assert here.headers["access-control-allow-origin"] == "http://localhost:3000"
    assert "access-control-allow-origin" not in elsewhere.headers


def test_what_was_asked_for_is_not_ended_by_a_request(tmp_path):
    async def run():
        async with idling(tmp_path, idle_s=3600) as (server, _):
            assert (await server.client.post("/placement/tune")).status_code == 202
            await until(server.n_begun)
            refused = await server.get("/v1/models")
            return refused.status_code, (tmp_path / "kept").exists()

    assert asyncio.run(run()) == (503, False)


def test_the_end_of_the_server_ends_it(tmp_path):
    async def run():
        async with idling(tmp_path) as (server, _):
            await until(server.n_begun)
        return (tmp_path / "kept").exists()

    assert asyncio.run(run())
