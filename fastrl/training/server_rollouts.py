"""The source of completions that servers sample from the weights of the model that is trained."""

from __future__ import annotations

import secrets
import time
from concurrent.futures import Future
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from fastrl.config.advantages import AdvantageConfig
from fastrl.config.base import UserError
from fastrl.config.rollouts import ServerRolloutsConfig
from fastrl.training.advantages import RewardKL
from fastrl.training.context import RunContext
from fastrl.training.draws import Completion
from fastrl.training.order import seeded
from fastrl.training.rollouts import Rollouts
from fastrl.training.sampled_rollouts import ProblemRollouts
from fastrl.training.served_weights import ServedWeights
from fastrl.training.server_answers import CompletionRequest

if TYPE_CHECKING:  # of an optional package
    from fastrl.training.servers import Servers


@dataclass(frozen=True)
class _UnderWay:
    """A step's completions.

    Attributes:
        version: of the weights that sample.
        found: on the first process, which asks the servers; None on the others.
    """

    version: int
    found: Future[list[list[Completion]]] | None


class ServerRollouts(ProblemRollouts):
    """Rollouts of training problems in random order, sampled by servers.

    The first process asks the servers, and all get the completions. Weights of a step go to the
    servers when nothing is sampled, so each document is of one version: the steps done before in
    the phase. A step that is sampled ahead is sampled again after a resumption.

    Args:
        config: servers, and numbers of prompts and completions.
        advantage: from rewards to advantages.
        context: of the run.
        seed: of the order of problems, and of sampling.
        steps: of the phase.

    Raises:
        UserError: the HTTP client is not installed.
    """

    def __init__(
        self,
        config: ServerRolloutsConfig,
        advantage: AdvantageConfig,
        context: RunContext,
        seed: str,
        steps: int,
    ) -> None:
        assert context.environment is not None
        super().__init__(
            config,
            advantage,
            context.environment,
            context.tokenizer,
            context.sampler.config.max_new_tokens,
            seed,
        )
        if find_spec("httpx2") is None:
            raise UserError(
                "`rollouts.type: server` needs the httpx2 package; install it with: "
                "pip install 'fastrl[servers]'"
            )
        self._config = config
        self._context = context
        self._seed = seed
        self._steps = steps
        self._weights = ServedWeights(Path(config.weights.folder), context.processes)
        self._servers: Servers | None = None
        self._under_way: _UnderWay | None = None
        self._loaded: int | None = None
        self._run = secrets.token_hex(4)

    def start(self) -> None:
        """Asks all servers whether they can serve the run."""
        self._weights.check()
        self._context.processes.from_main(self._connect)

    def next(self, reward_kl: RewardKL | None = None) -> Rollouts:
        """A group of completions for each of the next problems.

        Raises:
            UserError: a server fails or its answers cannot be trained on; on all processes.
        """
        number = self._config.prompts_per_step
        begin = time.monotonic()
        version = self.items.position // number
        done = self._under_way or self._begin(self.items.position, version)
        self._under_way = None
        groups = self._context.processes.from_main(lambda: _result(done.found))
        taken = self.items.take(number)
        if self._config.ahead and version + 1 < self._steps:
            self._under_way = self._begin(self.items.position, version)
        waited = time.monotonic() - begin
        rollouts = self._rollouts(taken, groups, reward_kl, model_version=done.version)
        return replace(rollouts, metrics={**rollouts.metrics, "waited_seconds": waited})

    def close(self) -> None:
        """Leaves the servers, and what they are asked."""
        if self._servers is not None:
            self._servers.close()
            self._servers = None
        self._weights.close()

    def _connect(self) -> None:
        from fastrl.training.servers import Servers

        self._servers = Servers(self._config)
        self._servers.check(self.longest)

    def _begin(self, position: int, version: int) -> _UnderWay:
        """Has the servers sample the problems from a position on by the current weights.

        Args:
            position: of the first problem.
            version: of the weights.
        """
        processes, new = self._context.processes, None
        if self._loaded != version:
            files = self._context.model.files()
            files = replace(files, contents={**self._context.tokenizer.files, **files.contents})
            new = self._weights.write(files, version)
        problems = self.items.following(position, self._config.prompts_per_step)
        requests = [
            self._request(position + place, prompt) for place, (_, prompt) in enumerate(problems)
        ]
        name = f"{self._run}-{version}"
        found: Future[list[list[Completion]]] | None = None

        def ask() -> None:
            nonlocal found
            assert self._servers is not None
            if new is not None:
                self._servers.load(new, name)
            found = self._servers.begin(requests, name)

        processes.from_main(ask)
        if new is not None:
            self._weights.keep(new)
            self._loaded = version
        return _UnderWay(version, found)

    def _request(self, position: int, prompt: list[int]) -> CompletionRequest:
        config, context = self._config, self._context
        return CompletionRequest(
            prompt=prompt,
            number=config.group_size,
            temperature=config.temperature,
            logprobs_temperature=config.temperature if config.processed_logprobs else 1.0,
            max_new_tokens=self._max_new_tokens,
            end_tokens=context.tokenizer.end_tokens,
            vocab_size=context.model.limits.vocab_size,
            seed=seeded(self._seed, "server", position).getrandbits(62),
        )


def _result(found: Future[list[list[Completion]]] | None) -> list[list[Completion]]:
    assert found is not None
    return found.result()
