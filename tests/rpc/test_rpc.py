"""core.rpc over real sockets: token, bounds, repeated requests, deadlines."""

from __future__ import annotations

import asyncio
import hmac
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import urllib3

from core.rpc.auth import bearer_ok
from core.rpc.client import AsyncClient, Client
from core.rpc.errors import PortTakenError, RpcError
from core.rpc.service import Call, Reply, Service, bound_socket, prometheus_text, serve_in_thread

TOKEN = "5f" * 32


class Counter:
    """A service with every kind of route."""

    def __init__(self) -> None:
        self.count = 0
        self.release = threading.Event()
        self.service = Service(
            "counter", TOKEN, max_body=1000, status=lambda: {"count": self.count}, metrics=lambda: {"count": self.count}
        )
        self.service.post("/add", self.add, once=True)
        self.service.post("/plain", self.add)
        self.service.post("/slow", self.slow, once=True)
        self.service.post("/fail", self.fail, once=True)
        self.service.get("/items/{item}", self.item)
        self.service.get("/blob", self.blob)
        self.service.get("/refuse", self.refuse)
        self.service.get("/hang", self.hang)
        self.url = serve_in_thread(self.service)

    async def add(self, call: Call) -> Reply:
        self.count += call.json().get("by", 1)
        return {"count": self.count}

    async def slow(self, call: Call) -> Reply:
        self.count += 1
        await asyncio.to_thread(self.release.wait, 30)
        return {"count": self.count}

    async def fail(self, call: Call) -> Reply:
        self.count += 1
        raise ValueError("the disk is full")

    async def item(self, call: Call) -> Reply:
        return {"item": call.path["item"], "query": dict(call.query)}

    async def blob(self, call: Call) -> Reply:
        return b"\x00\xff" * 10

    async def refuse(self, call: Call) -> Reply:
        raise RpcError(404, "no such batch: 7")

    async def hang(self, call: Call) -> Reply:
        await asyncio.sleep(60)
        return {}


@pytest.fixture
def counter() -> Iterator[Counter]:
    counter = Counter()
    yield counter
    counter.release.set()


def test_health_is_open_and_everything_else_wants_the_token(counter: Counter) -> None:
    assert urllib3.request("GET", counter.url + "/health").json() == {"ok": True, "name": "counter"}
    for path in ("/status", "/metrics", "/blob", "/items/3"):
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}, {"Authorization": "Bearer "}):
            reply = urllib3.request("GET", counter.url + path, headers=headers)
            assert reply.status == 401, (path, headers)
            assert TOKEN not in reply.data.decode()
    with pytest.raises(RpcError) as caught:
        Client(counter.url, "wrong").post("/add", {})
    assert caught.value.status == 401
    assert counter.count == 0


def test_a_service_without_a_token_lets_nobody_in() -> None:
    assert not bearer_ok({"Authorization": "Bearer "}, "")
    assert not bearer_ok({}, "")
    assert bearer_ok({"Authorization": "Bearer abc"}, "abc")
    assert not bearer_ok({"Authorization": "Bearer abcd"}, "abc")
    assert not bearer_ok({"Authorization": "Bearer \udcff"}, "abc")


def test_the_token_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = hmac.compare_digest

    def recorded(a: bytes, b: bytes) -> bool:
        seen.append((a, b))
        return real(a, b)

    monkeypatch.setattr(hmac, "compare_digest", recorded)
    bearer_ok({"Authorization": "Bearer x"}, TOKEN)
    bearer_ok({}, TOKEN)
    assert seen == [(b"x", TOKEN.encode()), (b"", TOKEN.encode())]


def test_routes_status_metrics(counter: Counter) -> None:
    client = Client(counter.url, TOKEN)
    assert client.get("/items/7", wait=20, flag=True, none=None) == {
        "item": "7",
        "query": {"wait": "20", "flag": "true"},
    }
    assert client.get_bytes("/blob") == b"\x00\xff" * 10
    client.post("/plain", {"by": 5})
    status = client.get("/status")
    assert status["name"] == "counter" and status["count"] == 5 and status["uptime"] >= 0
    assert client.get_bytes("/metrics").decode().splitlines() == ["counter_up 1", "counter_count 5.0"]
    assert prometheus_text("a-b", {"x/y": 0.5}) == "a_b_up 1\na_b_x_y 0.5\n"


def test_a_body_over_the_bound_is_refused(counter: Counter) -> None:
    client = Client(counter.url, TOKEN)
    client.post("/plain", {"text": "x" * 900})
    with pytest.raises(RpcError, match="larger than 1000 bytes") as caught:
        client.post("/plain", {"text": "x" * 1000})
    assert caught.value.status == 413

    def chunks() -> Iterator[bytes]:
        for _ in range(50):
            yield b"x" * 100

    headers = {"Authorization": f"Bearer {TOKEN}"}
    reply = urllib3.request("POST", counter.url + "/plain", body=chunks(), headers=headers)
    assert reply.status == 413
    assert counter.count == 1


def test_a_body_that_is_no_object_is_refused(counter: Counter) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    for body in (b"[1]", b"{", b"\xff\xfe", b"3"):
        reply = urllib3.request("POST", counter.url + "/plain", body=body, headers=headers)
        assert reply.status == 400, body
        assert "error" in reply.json()


def test_a_repeated_request_is_done_once(counter: Counter) -> None:
    client = Client(counter.url, TOKEN)
    first = client.post("/add", {"by": 2}, request_id="publish-1")
    assert client.post("/add", {"by": 2}, request_id="publish-1") == first == {"count": 2}
    assert client.post("/add", {"by": 2}, request_id="publish-2") == {"count": 4}
    with pytest.raises(RpcError, match="another body") as caught:
        client.post("/add", {"by": 3}, request_id="publish-1")
    assert caught.value.status == 409
    client.post("/add", {})
    client.post("/add", {})
    assert counter.count == 6


def test_a_repeated_request_joins_the_running_one(counter: Counter) -> None:
    client = Client(counter.url, TOKEN)
    with pytest.raises(RpcError, match=r"no answer within 0\.2 s"):
        client.post("/slow", {}, timeout=0.2, request_id="a")
    counter.release.set()
    assert client.post("/slow", {}, request_id="a", timeout=10) == {"count": 1}
    assert counter.count == 1


def test_a_repeated_request_gets_the_recorded_error(counter: Counter) -> None:
    client = Client(counter.url, TOKEN)
    for _ in range(2):
        with pytest.raises(RpcError, match="ValueError: the disk is full") as caught:
            client.post("/fail", {}, request_id="f")
        assert caught.value.status == 500
    assert counter.count == 1


def test_errors_carry_status_message_url(counter: Counter) -> None:
    with pytest.raises(RpcError) as caught:
        Client(counter.url, TOKEN).get("/refuse")
    assert (caught.value.status, caught.value.message) == (404, "no such batch: 7")
    assert caught.value.url == counter.url + "/refuse"
    with pytest.raises(RpcError) as caught:
        Client(counter.url, TOKEN).get("/nothing")
    assert caught.value.status == 404
    with pytest.raises(RpcError, match="no answer within"):
        Client(counter.url, TOKEN, timeout=0.2).get("/hang")


def test_nobody_there_is_status_0_and_soon() -> None:
    listener = bound_socket("127.0.0.1")
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    listener.close()
    started = time.monotonic()
    with pytest.raises(RpcError, match="cannot be reached") as caught:
        Client(url, TOKEN).get("/status")
    assert caught.value.unreachable and time.monotonic() - started < 5

    async def ask() -> None:
        client = AsyncClient(url, TOKEN)
        with pytest.raises(RpcError, match="cannot be reached"):
            await client.get("/status")
        await client.close()

    asyncio.run(ask())


def test_the_asynchronous_client_does_the_same(counter: Counter) -> None:
    async def ask() -> None:
        client = AsyncClient(counter.url + "/", TOKEN)
        assert await client.get("/items/1", n=2) == {"item": "1", "query": {"n": "2"}}
        assert await client.get_bytes("/blob") == b"\x00\xff" * 10
        assert await client.post("/add", {"by": 2}, request_id="r") == {"count": 2}
        assert await client.post("/add", {"by": 2}, request_id="r") == {"count": 2}
        with pytest.raises(RpcError, match="no such batch"):
            await client.get("/refuse")
        with pytest.raises(RpcError, match=r"no answer within 0\.1 s"):
            await client.get("/hang", timeout=0.1)
        answers = await asyncio.gather(*(client.get(f"/items/{i}") for i in range(50)))
        assert [answer["item"] for answer in answers] == [str(i) for i in range(50)]
        await client.close()

    asyncio.run(ask())


def test_a_get_survives_a_connection_that_breaks() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    body = b'{"ok": 1}'

    def serve() -> None:
        listener.accept()[0].close()
        connection = listener.accept()[0]
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(body), body))
        connection.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert Client(f"http://127.0.0.1:{listener.getsockname()[1]}", TOKEN).get("/x") == {"ok": 1}
    thread.join(timeout=10)
    listener.close()


def test_a_taken_port_is_named() -> None:
    taken = bound_socket("127.0.0.1")
    port = taken.getsockname()[1]

    async def start() -> None:
        await Service("x", TOKEN).start("127.0.0.1", port)

    with pytest.raises(PortTakenError, match=f"port {port} on 127.0.0.1 is taken"):
        asyncio.run(start())
    taken.close()


def test_proxies_of_the_environment_are_not_used(counter: Counter, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert Client(counter.url, TOKEN).get("/items/1")["item"] == "1"

    async def ask() -> None:
        client = AsyncClient(counter.url, TOKEN)
        assert (await client.get("/items/1"))["item"] == "1"
        await client.close()

    asyncio.run(ask())
