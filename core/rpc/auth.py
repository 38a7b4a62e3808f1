"""Headers of our HTTP: the request id, and the run's token with its one constant-time comparison."""

from __future__ import annotations

import hmac
from collections.abc import Mapping

REQUEST_ID = "X-Request-Id"


def bearer_ok(request_headers: Mapping[str, str], token: str) -> bool:
    """True when the headers carry `Authorization: Bearer <token>`; takes the same time for every wrong token."""
    scheme, _, given = request_headers.get("Authorization", "").partition(" ")
    same = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), token.encode())
    return same and scheme.lower() == "bearer" and bool(token)


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}
