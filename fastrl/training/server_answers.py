"""What is asked of a server for a group of completions, and what its answer must be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastrl.config.base import UserError
from fastrl.data.documents import Document
from fastrl.data.foreign_rollouts import openai_documents
from fastrl.training.draws import Completion

_BYTES_PER_TOKEN = 1024
_BYTES_BESIDE = 2**20


@dataclass(frozen=True)
class CompletionRequest:
    """A group of completions of one prompt.

    Attributes:
        prompt: token ids.
        number: completions.
        temperature: of sampling.
        logprobs_temperature: at which the server takes log-probabilities.
        max_new_tokens: of a completion.
        end_tokens: ids; a completion ends with the first of any of them.
        vocab_size: of the model; ids are below it.
        seed: of the completions.
    """

    prompt: list[int]
    number: int
    temperature: float
    logprobs_temperature: float
    max_new_tokens: int
    end_tokens: tuple[int, ...]
    vocab_size: int
    seed: int

    def body(self, model: str) -> dict[str, Any]:
        """The body of the request: plain sampling, whatever the model's own defaults are."""
        return {
            "model": model,
            "prompt": self.prompt,
            "n": self.number,
            "max_tokens": self.max_new_tokens,
            "seed": self.seed,
            "temperature": self.temperature,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": list(self.end_tokens),
            "ignore_eos": True,  # those of `stop_token_ids` alone
            "logprobs": 0,  # of the sampled token
            "return_token_ids": True,
        }

    @property
    def max_bytes(self) -> int:
        """Of an answer."""
        tokens = self.number * (len(self.prompt) + self.max_new_tokens)
        return _BYTES_BESIDE + _BYTES_PER_TOKEN * tokens

    def completions(self, answer: dict[str, Any], model: str, where: str) -> list[Completion]:
        """The completions of an answer of `/v1/completions`.

        Args:
            answer: parsed JSON, of any kind.
            model: that was asked for.
            where: the server, for messages.

        Raises:
            UserError: an answer of another model, of text alone, to another prompt, with ids
                outside of the vocabulary or without log-probabilities; anything that would be
                trained on as what it is not.
        """
        if answer.get("model") != model:
            raise _wrong(where, f"be of model {model!r}", f"one of {answer.get('model')!r}")
        documents = list(
            openai_documents([(where, answer)], self.temperature, self.logprobs_temperature, [])
        )
        if len(documents) != self.number:
            raise _wrong(where, f"have {self.number} completions", f"{len(documents)}")
        pairs = zip(documents, answer["choices"], strict=True)
        return [self._completion(document, choice, where) for document, choice in pairs]

    def _completion(self, document: Document, choice: dict[str, Any], where: str) -> Completion:
        ids, length = list(document.tokens), len(self.prompt)
        prompt, tokens = ids[:length], ids[length:]
        if document.prompt_length != length or prompt != self.prompt:
            raise _wrong(where, f"repeat the prompt {self.prompt[:8]}...", f"{prompt[:8]}...")
        if not tokens or len(tokens) > self.max_new_tokens:
            raise _wrong(where, f"have 1 to {self.max_new_tokens} tokens", f"{len(tokens)}")
        if outside := [token for token in tokens if not 0 <= token < self.vocab_size]:
            raise _wrong(
                where, f"have ids below the vocabulary size {self.vocab_size}", f"{outside[0]}"
            )
        if document.rollout_logprobs is None:
            raise _wrong(where, "have a log-probability of each token", "none")
        finished, reason = tokens[-1] in self.end_tokens, choice.get("finish_reason")
        ends = [token for token in tokens[:-1] if token in self.end_tokens]
        expected = ("stop",) if len(tokens) < self.max_new_tokens else ("stop", "length")
        if ends or (reason == "stop" and not finished) or reason not in expected:
            raise _wrong(
                where,
                f"stop at the end tokens {list(self.end_tokens)} or after {self.max_new_tokens}"
                " tokens, and nowhere else",
                f"{len(tokens)} tokens that end with {tokens[-1]} and `finish_reason` {reason!r}",
            )
        logprobs = [float(value) for value in document.rollout_logprobs]
        return Completion(tokens, logprobs, finished)


def _wrong(where: str, requirement: str, found: str) -> UserError:
    return UserError(
        f"{where}: an answer must {requirement}, got {found}; it is not trained on, and the run"
        " ends here"
    )
