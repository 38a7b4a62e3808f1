"""Bodies of the embedded server's HTTP: JSON in, errors as SGLang words them out."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web

from core.inference.embedded.request import BadRequestError


async def read_json(http: web.Request) -> dict[str, Any]:
    data = await http.read()
    try:
        body = json.loads(data or b"{}")
    except ValueError as error:
        raise BadRequestError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequestError("the body must be a JSON object")
    return body


def error_reply(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)
