"""Who may ask the dashboard what: every route without the token, with a wrong Host or Origin, with
other methods.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import http.server
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from dashboards import Serving, serving
from playwright.sync_api import Browser, expect
from starlette.routing import Route
from telemetry_feed import arrive, beat, counters

from burst_rt.dashboard.app import Dashboard, make_app
from burst_rt.dashboard.server import RunningDashboard, Where
from burst_rt.errors import ConfigError, InputError
from burst_rt.telemetry.messages import Hello, Note, Severity
from burst_rt.telemetry.model.job_model import JobModel
from burst_rt.telemetry.read.viewer import ModelViewer

_EVIL = '<img src=x onerror="window.evil=1"><script>window.evil=1</script>'


def _small_job(command: str = "train.py") -> JobModel:
    model = JobModel(1e9)
    for rank in range(2):
        for message in arrive(rank):
            if isinstance(message, Hello):
                message = msgspec.structs.replace(message, command=command)
            model.apply(0.0, rank, message)
        for i in range(4):
            model.apply(0.5 * i, rank, counters(rank, 0.5 * i, i))
        model.apply(2.0, rank, beat(rank, 2.0))
    return model


def _paths() -> list[str]:
    routes = make_app(Dashboard(ModelViewer(_small_job()))).routes
    assert all(isinstance(route, Route) for route in routes), (
        "a mount or a websocket would need tests of its own"
    )
    return [route.path for route in routes if isinstance(route, Route)]


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(_small_job()) as running:
        yield running


def _ask(
    server: Serving, path: str, method: str = "GET", **headers: str
) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=10)
    connection.request(
        method, path, headers={name.replace("_", "-"): value for name, value in headers.items()}
    )
    response = connection.getresponse()
    if path != "/api/events" or response.status != 200 or method == "HEAD":
        response.body = response.read()  # type: ignore[attr-defined]  # for the caller
    connection.close()
    return response


def _cookie(server: Serving) -> str:
    response = _ask(server, f"/?token={server.served.token}")
    assert (response.status, response.headers["location"]) == (303, "/")
    return str(response.headers["set-cookie"])


def test_the_cookie_is_for_this_page_alone(server: Serving) -> None:
    parts = {part.strip().lower() for part in _cookie(server).split(";")}
    assert {"httponly", "samesite=lax", "path=/"} <= parts


def test_the_table_of_routes_is_what_it_should_be() -> None:
    paths = _paths()
    assert {
        "/",
        "/main.js",
        "/style.css",
        "/api/events",
        "/api/timeline",
        "/api/series",
        "/api/plans",
        "/metrics",
    } <= set(paths)
    assert not [path for path in paths if "{" in path], "no path may be named by a request"


@pytest.mark.parametrize("path", [*_paths(), "/nothing", "/../setup.cfg", "//", "/%2e%2e/"])
def test_every_route_refuses_who_lacks_the_token(server: Serving, path: str) -> None:
    assert _ask(server, path).status == 403
    assert _ask(server, path, Cookie=f"{_cookie(server).partition('=')[0]}=wrong").status == 403
    assert _ask(server, path, Authorization="Bearer wrong").status == 403
    assert _ask(server, f"{path}?token=wrong").status == 403
    if path != "/":
        # Links with a token open the page, nothing else.
        assert _ask(server, f"{path}?token={server.served.token}").status == 403


@pytest.mark.parametrize("path", _paths())
def test_every_route_answers_who_has_it_and_only_to_get_and_head(
    server: Serving, path: str
) -> None:
    cookie = _cookie(server).partition(";")[0]
    response = _ask(server, path, Cookie=cookie)
    assert response.status == 200
    assert response.headers["content-security-policy"].startswith("default-src 'self'")
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["cache-control"] == "no-store"
    assert "access-control-allow-origin" not in response.headers
    assert _ask(server, path, "HEAD", Cookie=cookie).status == 200
    assert _ask(server, path, Authorization=f"Bearer {server.served.token}").status == 200
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"):
        assert _ask(server, path, method, Cookie=cookie).status == 405
    assert _ask(server, path, Cookie=cookie, Host="evil.example").status == 421
    assert (
        _ask(server, path, Cookie=cookie, Host=f"127.0.0.1.evil.example:{server.port}").status
        == 421
    )
    assert _ask(server, path, Cookie=cookie, Host="10.0.0.1").status == 421
    assert _ask(server, path, Cookie=cookie, Origin="https://evil.example").status == 403
    assert _ask(server, path, Cookie=cookie, Origin="null").status == 403
    # Through a tunnel the port is another one.
    assert (
        _ask(
            server, path, Cookie=cookie, Host="localhost:9000", Origin="http://localhost:9000"
        ).status
        == 200
    )


def test_what_a_request_names_is_not_read(server: Serving) -> None:
    headers = {"Authorization": f"Bearer {server.served.token}"}
    for path in ("/setup.cfg", "/../style.css", "/%2e%2e/%2e%2e/etc/passwd", "/app.py", "/api"):
        assert _ask(server, path, **headers).status == 404
    for query in (
        "limit=nan",
        "limit=-5",
        "limit=1e99",
        "since=inf&until=-inf",
        "rank=-1&rank=x&rank=%D9%A3",
        "since=0&until=x",
    ):
        assert _ask(server, f"/api/timeline?{query}", **headers).status in (200, 400)
    for rank in ("9" * 5000, "9" * 23):
        told = _ask(server, f"/api/timeline?rank={rank}", **headers)
        text = told.body.decode()  # type: ignore[attr-defined]  # see _ask
        assert told.status == 400
        assert text.startswith(f"rank: expected at most 9 digits, got {len(rank)}: 999")
    found = _ask(server, "/api/series?source=../../etc/passwd", **headers)
    assert json.loads(found.body) == []  # type: ignore[attr-defined]  # see _ask


def test_those_who_say_nothing_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("burst_rt.dashboard.server._REQUEST_DEADLINE_S", 1.0)
    with serving(_small_job()) as running, contextlib.ExitStack() as opened:
        cookie = _cookie(running).partition(";")[0]
        mute = [
            opened.enter_context(socket.create_connection((running.host, running.port)))
            for _ in range(200)
        ]
        for half in mute[::2]:
            half.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n")
        for _ in range(20):
            assert _ask(running, "/api/plans", Cookie=cookie).status == 200
        opened_s = time.monotonic()
        for half in mute:
            half.settimeout(10)
            with contextlib.suppress(ConnectionResetError):
                assert half.recv(100) == b""
        assert time.monotonic() - opened_s < 5
        # Of a connection that has asked before, too.
        again = http.client.HTTPConnection(running.host, running.port, timeout=10)
        again.request("GET", "/api/plans", headers={"Cookie": cookie})
        assert again.getresponse().read()
        again.sock.sendall(b"GET /")
        with contextlib.suppress(ConnectionResetError):
            assert again.sock.recv(100) == b""
        again.close()


def test_requests_that_are_none_write_nothing_into_the_terminal(
    server: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(50):
        with socket.create_connection((server.host, server.port)) as stranger:
            stranger.sendall(b"\x16\x03\x01 nonsense\r\n\r\n")
            assert b"400 Bad Request" in stranger.recv(1000)
    assert _ask(server, "/", Authorization="Bearer wrong").headers["connection"] == "close"
    assert caplog.records == []


def test_another_address_only_with_a_warning() -> None:
    assert Where.parse("1").is_loopback
    assert Where.parse("[::1]:0").is_loopback
    assert Where.parse("").warning == ""
    assert "tunnel" in Where.parse("0.0.0.0:0").warning
    assert not Where.parse("0.0.0.0:0").is_loopback
    with pytest.raises(InputError, match="HOST:PORT"):
        Where.parse("everywhere")
    # Not one of loopback's usual names, and yet only this machine can connect.
    with serving(_small_job(), Where.parse("127.0.0.2:0")) as running:
        assert running.served.lines[0].startswith("WARNING")
        cookie = _cookie(running).partition(";")[0]
        assert (
            _ask(
                running, "/api/plans", Cookie=cookie, Host=f"{socket.gethostname()}:{running.port}"
            ).status
            == 200
        )
        assert _ask(running, "/api/plans", Cookie=cookie, Host="10.0.0.1").status == 200
        assert _ask(running, "/api/plans", Cookie=cookie, Host="evil.example").status == 421


def test_a_port_that_is_taken_is_said() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(ConfigError, match="choose another port"),
    ):
        RunningDashboard(ModelViewer(_small_job()), Where(port=taken.getsockname()[1]))


def test_names_from_a_run_stay_text(browser: Browser) -> None:
    model = _small_job(_EVIL)
    model.apply(2.0, 0, Note(2.0, Severity.WARNING, _EVIL, _EVIL))
    with serving(model) as running:
        page = browser.new_page()
        page.goto(running.served.link)
        expect(page.locator("#command")).to_contain_text("onerror")
        expect(page.locator(".events")).to_contain_text(_EVIL)
        for name in ("timeline", "history", "traffic", "job"):
            page.goto(re.sub(r"\?.*", f"#{name}", running.served.link))
            page.wait_for_timeout(300)
        assert page.evaluate("window.evil") is None
        assert page.locator("img[src=x]").count() == 0
        page.close()


def test_a_link_on_a_page_of_another_site_opens_the_dashboard(
    server: Serving, browser: Browser, tmp_path: Path
) -> None:
    """JupyterLab and mail in a browser are such pages."""
    (tmp_path / "mail.html").write_text(f'<a href="{server.served.link}">the job</a>')
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as site:
        threading.Thread(target=site.serve_forever, daemon=True).start()
        page = browser.new_page()
        page.goto(f"http://localhost:{site.server_port}/mail.html")
        page.click("a")
        expect(page.get_by_role("link", name="Overview")).to_be_visible()
        page.close()
        site.shutdown()


def test_more_names_than_are_answered_are_refused(server: Serving) -> None:
    path = "/api/series?" + "&".join(f"source=rank:{i}" for i in range(257))
    refused = _ask(server, path, Authorization=f"Bearer {server.served.token}")
    assert refused.status == 400
    assert b"at most 256, got 257" in refused.body  # type: ignore[attr-defined]
