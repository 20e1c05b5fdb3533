"""Who may see the dashboard: viewers with the run's token that ask from its page and only read.

It checks the token, Host, Origin, and the method (GET or HEAD), before every route.

The token comes once with the link, and then as a cookie that scripts cannot read and other sites'
pages cannot send; Prometheus sends it as a bearer token. The Host header must name this machine,
against DNS rebinding. An Origin header, where a browser sends one, must be the page's own.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["Guard"]

_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src "
        "'self'; object-src 'none'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Guard:
    """Wraps an application.

    token: None lets everybody in who may ask at all. hosts: names that the Host header may have
    besides loopback's; with any of them, a numeric address is accepted too.
    """

    def __init__(
        self, app: ASGIApp, token: str | None, hosts: frozenset[str] = frozenset()
    ) -> None:
        self._app = app
        self._open = token is None
        self._token = (token or "").encode()
        self._hosts = hosts
        # A cookie is for all ports of a host: two jobs there must not take each other's.
        self.cookie = f"burst_rt_{hashlib.sha256(self._token).hexdigest()[:12]}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        response = self._answer(scope)

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
            await send(message)

        if response is not None and response.status_code >= 400:
            # Each guess at the token takes a connection of its own.
            response.headers["Connection"] = "close"
        await (response or self._app)(scope, receive, with_headers)

    def _answer(self, scope: Scope) -> Response | None:
        """The refusal, or the redirection that sets the cookie; None where the application is to
        answer.
        """
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if not self._names_us(host):
            return PlainTextResponse("The dashboard is not served under this Host.\n", 421)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse(
                "The dashboard answers only GET and HEAD.\n", 405, {"Allow": "GET, HEAD"}
            )
        origin = headers.get("origin")
        if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
            return PlainTextResponse("Pages of another origin may not ask the dashboard.\n", 403)
        if self._open:
            return None
        if scope["path"] == "/":
            (offered, *_) = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])
            if self._is_token(offered):
                response = RedirectResponse("/", 303)
                # A strict cookie would not come where the link is on a page of another site.
                response.set_cookie(self.cookie, offered, httponly=True, samesite="lax", path="/")
                return response
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        if self._is_token(cookie_parser(headers.get("cookie", "")).get(self.cookie, "")):
            return None
        if scheme.lower() == "bearer" and self._is_token(bearer.strip()):
            return None
        return PlainTextResponse("Open the link that the run printed: it carries the token.\n", 403)

    def _is_token(self, offered: str) -> bool:
        return hmac.compare_digest(offered.encode("utf-8", "surrogatepass"), self._token)

    def _names_us(self, host: str) -> bool:
        name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        name = name.removeprefix("[").removesuffix("]").lower()
        return name in _LOOPBACK or name in self._hosts or (bool(self._hosts) and _is_address(name))


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
