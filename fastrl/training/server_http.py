"""Requests to one server: retries, time and size are bounded, answers are JSON objects.

A server is not trusted: its answers are parsed as data, and what is not as expected ends the run.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2

from fastrl.config.base import UserError

_ANSWER_BYTES = 2**20
"""Longest answer to a short question."""

_TRANSIENT = frozenset({408, 429, 500, 502, 503, 504})
"""Statuses of a server that may answer later."""

_SECONDS_TO_CONNECT = 10.0
_SECONDS_IDLE = 2.0  # vLLM closes connections after 5
_LONGEST_PAUSE = 30.0
_SHOWN = 300


class StatusError(UserError):
    """A server answers, and cannot."""


def new_client() -> httpx2.AsyncClient:
    """A client for all servers: no proxies, no redirects, answers as they are sent."""
    return httpx2.AsyncClient(
        headers={"accept-encoding": "identity"},
        timeout=httpx2.Timeout(None, connect=_SECONDS_TO_CONNECT),
        limits=httpx2.Limits(
            max_connections=None,
            max_keepalive_connections=None,
            keepalive_expiry=_SECONDS_IDLE,
        ),
        follow_redirects=False,
        trust_env=False,
    )


class Connection:
    """One server.

    Args:
        url: its address, without a path.
        client: that sends the requests.
        timeout: seconds that an answer may take.
        retries: further tries after a failure of the server's.
    """

    def __init__(self, url: str, client: httpx2.AsyncClient, timeout: float, retries: int) -> None:
        self.url = url
        self._client = client
        self._timeout = timeout
        self._retries = retries

    async def get(self, path: str) -> dict[str, Any]:
        """The answer to a GET request; see `post`."""
        return self._parsed(path, *await self._answer("GET", path, None, _ANSWER_BYTES))

    async def post(
        self, path: str, body: dict[str, Any], max_bytes: int = _ANSWER_BYTES
    ) -> dict[str, Any]:
        """The answer to a POST request.

        Args:
            path: at the server.
            body: sent as JSON.
            max_bytes: of the answer.

        Raises:
            StatusError: another status than 200, in all tries if it is one that may pass.
            UserError: no answer in all tries, one that is too long or no JSON object.
        """
        return self._parsed(path, *await self._answer("POST", path, body, max_bytes))

    async def allows_post(self, path: str) -> bool:
        """Whether the server has a path for POST requests, which answers others so."""
        status, _ = await self._answer("GET", path, None, _ANSWER_BYTES)
        return status == 405

    async def _answer(
        self, method: str, path: str, body: dict[str, Any] | None, max_bytes: int
    ) -> tuple[int, bytes]:
        """Status and content of the first answer that is no failure of the server, or the last."""
        problem = ""
        for number in range(self._retries + 1):
            if number:
                await asyncio.sleep(min(0.5 * 2 ** (number - 1), _LONGEST_PAUSE))
            try:
                async with asyncio.timeout(self._timeout):
                    status, content = await self._once(method, path, body, max_bytes)
            except TimeoutError:
                problem = f"no answer within {self._timeout:g} s"
            except (httpx2.HTTPError, httpx2.InvalidURL) as error:
                problem = f"{type(error).__name__}: {error}"[:_SHOWN]
            else:
                if status not in _TRANSIENT or number == self._retries:
                    return status, content
        tries = "1 try" if self._retries == 0 else f"{self._retries + 1} tries"
        raise UserError(
            f"{self.url}: the server must answer to {path}, did not in {tries} ({problem}); the run"
            " ends here. Start the server again, and go on with --resume"
        )

    async def _once(
        self, method: str, path: str, body: dict[str, Any] | None, max_bytes: int
    ) -> tuple[int, bytes]:
        content = bytearray()
        async with self._client.stream(method, self.url + path, json=body) as response:
            async for part in response.aiter_raw():
                content += part
                if len(content) > max_bytes:
                    raise UserError(
                        f"{self.url}{path}: an answer must have at most {max_bytes:,} bytes, which"
                        " is ample for what was asked, got more"
                    )
        return response.status_code, bytes(content)

    def _parsed(self, path: str, status: int, content: bytes) -> dict[str, Any]:
        where, shown = f"{self.url}{path}", _shown(content)
        if status != 200:
            raise StatusError(f"{where}: must answer with status 200, got {status}: {shown}")
        try:
            answer = json.loads(content or b"{}")
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: must answer in JSON: {error}, got {shown}") from error
        if not isinstance(answer, dict):
            raise UserError(f"{where}: must answer with a JSON object, got {shown}")
        return answer


def _shown(content: bytes) -> str:
    """An answer for a message: its begin, on one line."""
    text = " ".join(content[: 4 * _SHOWN].decode("utf-8", "replace").split())
    printable = "".join(character if character.isprintable() else "?" for character in text)
    return printable[:_SHOWN] or "nothing"
