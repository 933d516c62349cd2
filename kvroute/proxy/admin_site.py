"""What every admin listener has in common, a router's own as well as that of several workers.

Errors have the shape that the public listener gives them, also those that the HTTP library would write as text. Bytes
that are no request are one line in the log. It does not know what is served.
"""

from __future__ import annotations

import logging
from http import HTTPStatus

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler

log = logging.getLogger("kvroute.admin")


def application(body_bytes_max: int) -> web.Application:
    """Return an application without routes."""
    return web.Application(client_max_size=body_bytes_max, middlewares=[in_one_shape, no_other_site])


def runner_of(app: web.Application) -> web.AppRunner:
    """Return what serves an admin application."""
    return web.AppRunner(app, access_log=None, logger=log)


def error_body(status: int, message: str, param: str | None = None) -> bytes:
    """Return an error as the public listener writes it."""
    kind = HTTPStatus(status).phrase.title().replace(" ", "").removesuffix("Error") + "Error"
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": status}})


def refusal(status: int, message: str, param: str | None = None) -> web.Response:
    """Return an error as an answer."""
    return web.Response(status=status, body=error_body(status, message, param), content_type="application/json")


@web.middleware
async def in_one_shape(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Say as JSON what the library says as text: no such route, another method, a body that is too large."""
    try:
        return await handler(request)
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods - {"HEAD"}))
        answer = refusal(405, f"{request.path} takes {allowed}, not {request.method}")
        answer.headers["Allow"] = error.headers["Allow"]
        return answer
    except web.HTTPNotFound:
        return refusal(404, f"There is no route {request.path} here")
    except web.HTTPClientError as error:
        return refusal(error.status, error.text or error.reason)


@web.middleware
async def no_other_site(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse what another site's page tells a browser to change here: loopback is no wall against that.

    Source: Fetch Metadata (W3C), `Sec-Fetch-Site`, which browsers send and pages cannot set.
    """
    if request.method not in ("GET", "HEAD") and request.headers.get("Sec-Fetch-Site") in ("cross-site", "same-site"):
        return refusal(403, "This came from another site's page; use this router's own page, or no browser")
    return await handler(request)


def in_one_line(record: logging.LogRecord) -> bool:
    """Log bytes that are no request without the stack of the parser that met them."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError):
        record.msg, record.args = "a request cannot be read: %s", (" ".join(error.message.split()),)
        record.exc_info, record.levelno, record.levelname = None, logging.WARNING, "WARNING"
    return True


log.addFilter(in_one_line)
