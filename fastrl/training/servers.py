"""The servers of a run, asked by one process from a thread beside its training."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import httpx2

from fastrl.config.base import UserError
from fastrl.config.rollouts import ServerRolloutsConfig
from fastrl.training.draws import Completion
from fastrl.training.server_answers import CompletionRequest
from fastrl.training.server_http import Connection, StatusError, new_client

T = TypeVar("T")

_CONTROL = ("/collective_rpc", "/reset_prefix_cache", "/update_weight_version")
"""Paths by which a server takes weights."""

_SECONDS_TO_END = 5.0


class Servers:
    """Servers that speak OpenAI's completions and take weights as vLLM does.

    Args:
        config: addresses, and bounds of requests.
    """

    def __init__(self, config: ServerRolloutsConfig) -> None:
        self._config = config
        self._models: dict[str, str] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="fastrl-servers", daemon=True
        )
        self._thread.start()
        self._client, self._connections = self._wait(self._connected())

    def check(self, longest: int) -> None:
        """Refuses servers that cannot sample documents of so many tokens, or take no weights.

        Raises:
            UserError: naming the server and what it lacks.
        """
        self._wait(_all(self._check(each, longest) for each in self._connections))

    def load(self, folder: Path, version: str) -> None:
        """Has all servers read weights, and note their version, while none samples.

        Raises:
            UserError: a server cannot.
        """
        self._wait(_all(self._load(each, folder, version) for each in self._connections))

    def begin(
        self, requests: Sequence[CompletionRequest], version: str
    ) -> Future[list[list[Completion]]]:
        """The completions of each request, under way.

        The future raises UserError if a server fails, if an answer is not what was asked for, or if
        a server has other weights than of `version` at the end, as one that was started again.
        """
        return asyncio.run_coroutine_threadsafe(self._sample(requests, version), self._loop)

    def close(self) -> None:
        """Leaves what is under way."""
        if not self._loop.is_closed():
            ending = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
            ending.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._loop.stop))
            self._thread.join(_SECONDS_TO_END)
            if not self._thread.is_alive():
                self._loop.close()

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _connected(self) -> tuple[httpx2.AsyncClient, list[Connection]]:
        config, client = self._config, new_client()
        return client, [
            Connection(url, client, config.timeout, config.retries) for url in config.urls
        ]

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._client.aclose()

    async def _check(self, connection: Connection, longest: int) -> None:
        url = connection.url
        data = (await connection.get("/v1/models")).get("data")
        models = {
            str(each.get("id")): each.get("max_model_len")
            for each in (data if isinstance(data, list) else [])
            if isinstance(each, dict)
        }
        name = self._config.model or (next(iter(models)) if len(models) == 1 else None)
        if name not in models:
            wanted = "one model, or `rollouts.model` must name it" if name is None else repr(name)
            raise UserError(f"{url}: the server must have {wanted}, has {sorted(models)[:8]}")
        room = models[name]
        if isinstance(room, int) and room < longest:
            raise UserError(
                f"{url}: the server must take documents of {longest} tokens, takes {room}; start"
                f" vLLM with `--max-model-len {longest}`, or set `sampler.max_new_tokens`"
            )
        lacks = [path for path in _CONTROL if not await connection.allows_post(path)]
        if lacks:
            raise UserError(
                f"{url}: the server must take weights while it runs, but has no {lacks[0]}; start"
                " vLLM with VLLM_SERVER_DEV_MODE=1 in its environment"
            )
        self._models[url] = name

    async def _load(self, connection: Connection, folder: Path, version: str) -> None:
        weights = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        try:
            await connection.post("/collective_rpc", weights)
        except StatusError as error:
            raise UserError(
                f"{error}; the server must see {folder} under the same path as this run"
            ) from error
        for number in range(self._config.retries + 1):
            if number:
                await asyncio.sleep(0.5 * number)
            if (await connection.post("/reset_prefix_cache", {})).get("success") is True:
                break
        else:
            raise UserError(
                f"{connection.url}: the server must forget what it computed with the weights"
                " before (/reset_prefix_cache), does not while it has requests; a run must have its"
                " servers for itself"
            )
        await connection.post("/update_weight_version", {"new_version": version})

    async def _sample(
        self, requests: Sequence[CompletionRequest], version: str
    ) -> list[list[Completion]]:
        waiting = deque(enumerate(requests))
        found: list[list[Completion]] = [[] for _ in requests]

        async def work(connection: Connection) -> None:
            while waiting:
                number, request = waiting.popleft()
                found[number] = await self._complete(connection, request)

        # Each takes the next request when it is free, so a slow server gets fewer.
        workers = [each for _ in range(self._config.max_in_flight) for each in self._connections]
        await _all(work(each) for each in workers[: len(requests)])
        await _all(self._check_version(each, version) for each in self._connections)
        return found

    async def _complete(
        self, connection: Connection, request: CompletionRequest
    ) -> list[Completion]:
        model, path = self._models[connection.url], "/v1/completions"
        answer = await connection.post(path, request.body(model), request.max_bytes)
        return request.completions(answer, model, f"{connection.url}{path}")

    async def _check_version(self, connection: Connection, version: str) -> None:
        found = (await connection.get("/weight_info")).get("weight_version")
        if found != version:
            raise UserError(
                f"{connection.url}: the server must have the weights of this step, {version!r}, all"
                f" the time, has {str(found)[:80]!r}: it was started again, or serves another run"
                " too; its completions are not trained on, and the run ends here. Go on with"
                " --resume"
            )


async def _all(coroutines: Any) -> None:
    """Waits for all; the first error cancels the others."""
    try:
        async with asyncio.TaskGroup() as group:
            for each in coroutines:
                group.create_task(each)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
