"""The reference Llama: single-device code; sharding is applied from outside.

Module and parameter names are Hugging Face's, so its state dicts load unchanged. Tokens are packed,
[T], never padded to a rectangle. Attention is in `fastrl.models.attention`, files are in
`fastrl.models.checkpoint`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastrl.config.losses import LanguageModelHeadConfig
from fastrl.config.model import LlamaConfig
from fastrl.functional.batch import BatchKwargs
from fastrl.functional.head.matmul import matmul
from fastrl.layers.language_model_head import HeadOutput, LanguageModelHead
from fastrl.models.attend import Attend, DocumentLengths, LayerAttention
from fastrl.models.kv_cache import KVCache
from fastrl.models.rotary import Rotary
from fastrl.models.split_attention import Pieces, packed_attention
from fastrl.parallel import ParallelGroups


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dim, computed in at least fp32.

    References:
        Root Mean Square Layer Normalization, arXiv 1910.07467.
    """

    def __init__(
        self, size: int, eps: float, device: torch.device | None, dtype: torch.dtype | None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.eps = eps

    def forward(
        self,
        hidden_states: Tensor,  # [T, D]
    ) -> Tensor:  # [T, D]
        # torch computes it in fp32 for 16-bit inputs, one kernel on CUDA.
        return F.rms_norm(hidden_states, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention with rotary position embedding, in Qwen3 of normed queries and keys.

    References:
        GQA, arXiv 2305.13245; Qwen3 Technical Report, arXiv 2505.09388.
    """

    def __init__(
        self,
        config: LlamaConfig,
        device: torch.device | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        size = config.hidden_size
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        bias = config.attention_bias
        self.q_proj = nn.Linear(size, query_size, bias, device, dtype)
        self.k_proj = nn.Linear(size, key_size, bias, device, dtype)
        self.v_proj = nn.Linear(size, key_size, bias, device, dtype)
        self.o_proj = nn.Linear(query_size, size, config.attention_output_bias, device, dtype)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, device, dtype)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, device, dtype)

    def forward(
        self,
        hidden_states: Tensor,  # [T, D]
        rotary: Rotary,
        attend: Attend,
    ) -> Tensor:  # [T, D]
        # -1: under tensor parallelism the projections give the heads of this rank only.
        query = self.q_proj(hidden_states).unflatten(-1, (-1, self.head_dim))
        key = self.k_proj(hidden_states).unflatten(-1, (-1, self.head_dim))
        value = self.v_proj(hidden_states).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        attended = attend(rotary(query), rotary(key), value)
        output: Tensor = self.o_proj(attended.flatten(1))
        return output


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)).

    References:
        GLU Variants Improve Transformer, arXiv 2002.05202.
    """

    def __init__(
        self, config: LlamaConfig, device: torch.device | None, dtype: torch.dtype | None
    ) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(size, inner, config.mlp_bias, device, dtype)
        self.up_proj = nn.Linear(size, inner, config.mlp_bias, device, dtype)
        self.down_proj = nn.Linear(inner, size, config.mlp_bias, device, dtype)

    def forward(
        self,
        hidden_states: Tensor,  # [T, D]
    ) -> Tensor:  # [T, D]
        output: Tensor = self.down_proj(
            F.silu(self.gate_proj(hidden_states)) * self.up_proj(hidden_states)
        )
        return output


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self,
        config: LlamaConfig,
        device: torch.device | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps, device, dtype)
        self.self_attn = Attention(config, device, dtype)
        self.post_attention_layernorm = RMSNorm(size, eps, device, dtype)
        self.mlp = MLP(config, device, dtype)
        self.recomputes_mlp = config.activation_checkpointing == "attention"

    def forward(
        self,
        hidden_states: Tensor,  # [T, D]
        rotary: Rotary,
        attend: Attend,
    ) -> Tensor:  # [T, D]
        attention = self.self_attn(self.input_layernorm(hidden_states), rotary, attend)
        hidden_states = hidden_states + attention
        if self.recomputes_mlp and torch.is_grad_enabled():
            update: Tensor = checkpoint(self._mlp, hidden_states, use_reentrant=False)
        else:
            update = self._mlp(hidden_states)
        return hidden_states + update

    def _mlp(
        self,
        hidden_states: Tensor,  # [T, D]
    ) -> Tensor:  # [T, D]
        output: Tensor = self.mlp(self.post_attention_layernorm(hidden_states))
        return output


class Backbone(nn.Module):
    """Embedding, decoder layers and final norm: everything before the head."""

    def __init__(
        self,
        config: LlamaConfig,
        num_embeddings: int,
        device: torch.device | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.embed_tokens = nn.Embedding(num_embeddings, size, device=device, dtype=dtype)
        self.layers = nn.ModuleList(
            DecoderLayer(config, device, dtype) for _ in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(size, config.rms_norm_eps, device, dtype)

    def forward(
        self,
        tokens: Tensor,  # [T]
        positions: Tensor,  # [T]
        attention: LayerAttention,
    ) -> Tensor:  # [T, D]
        """The hidden states after the final norm."""
        hidden_states: Tensor = self.embed_tokens(tokens)
        rotary = Rotary.of(positions, self.config, hidden_states.dtype)
        recomputes = self.config.activation_checkpointing == "full" and torch.is_grad_enabled()
        for number, layer in enumerate(self.layers):
            attend = attention.of_layer(number)
            if recomputes:
                hidden_states = checkpoint(
                    layer, hidden_states, rotary, attend, use_reentrant=False
                )
            else:
                hidden_states = layer(hidden_states, rotary, attend)
        normed: Tensor = self.norm(hidden_states)
        return normed


class Llama(nn.Module):
    """A Llama that ends in the language-model head: its forward gives the loss.

    Weights start normal with standard deviation `initializer_range` (norms at one, biases at
    zero), drawn from torch's global generator: seed it before. On the meta device nothing is
    drawn: call `to_empty`, then `reset_parameters` or `fastrl.models.checkpoint.load_weights`. A
    tied head stays tied through both.

    Args:
        config: the architecture; `vocab_size` must be known.
        groups: process groups of the head, whose weight then has this rank's rows, and of attention
            over the sequence-data axis. `fastrl.models.parallelize` sets them with the shards.
        device: where parameters are made, "meta" for none yet.
        dtype: of parameters and activations; default: torch's default dtype.

    Raises:
        ValueError: the config has no `vocab_size`.
    """

    def __init__(
        self,
        config: LlamaConfig,
        groups: ParallelGroups | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if config.vocab_size is None:
            raise ValueError("`vocab_size` must be set in the model's config before it is built")
        device = torch.device(device) if device is not None else None
        self.config = config
        self.groups = groups or ParallelGroups()
        self.model = Backbone(config, config.padded_vocab_size or config.vocab_size, device, dtype)
        head_config = LanguageModelHeadConfig(
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            padded_vocab_size=config.padded_vocab_size,
            **dict(config.head),
        )
        self.lm_head = LanguageModelHead(head_config, groups, device=device, dtype=dtype)
        self.tie_weights()
        self.register_load_state_dict_post_hook(_tie_after_loading)
        if not self.model.norm.weight.is_meta:
            self.reset_parameters()

    def tie_weights(self) -> None:
        """Makes the head's weight the embedding's, the same parameter, if the config says so."""
        if self.config.tie_word_embeddings:
            weight = self.model.embed_tokens.weight
            assert isinstance(weight, nn.Parameter)
            self.lm_head.weight = weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # `to_empty` and moves between devices go through it; they give a shared parameter one copy
        # per module that holds it.
        super()._apply(fn, recurse)
        self.tie_weights()
        return self

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws all weights from torch's global generator."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.ndim == 1:
                nn.init.ones_(parameter)
            else:
                nn.init.normal_(parameter, std=self.config.initializer_range)

    def check_length(self, length: int | None) -> None:
        """Refuses documents that a sliding window would cut.

        Args:
            length: tokens of the longest document; None where it is not known.

        Raises:
            ValueError: the model has a sliding window, and `length` is larger or not known.
        """
        window = self.config.sliding_window
        if window is None:
            return
        if length is None:
            raise ValueError(
                f"`max_document_length` of the batch must be known to a model with `sliding_window`"
                f" {window}, got None; batches of TokenBatch know it"
            )
        if length > window:
            raise ValueError(
                f"documents must have at most `sliding_window` {window} tokens, got {length}; "
                "attention within a window is not implemented, shorten or drop those documents"
            )

    def hidden_states(
        self,
        tokens: Tensor,  # [T]
        positions: Tensor,  # [T]
        document_index: Tensor,  # [T]
        pieces: Pieces | None = None,
        lengths: DocumentLengths | None = None,
        visible_until: Tensor | None = None,  # [T]
    ) -> Tensor:  # [T, D]
        """The final hidden states of packed documents, which do not attend to each other.

        Args:
            tokens: int64 ids, of this rank under `groups.sdp`.
            positions: int64, of each token in its document.
            document_index: int64, -1 is padding. A document's rows are adjacent and in order, but
                for those that it shares.
            pieces: the pieces of the packed sequence that ran before; this one is added to them
                (`fastrl.models.micro_sequences`).
            lengths: of the documents, known on the host.
            visible_until: int64, of `BatchKwargs`, where documents share the slots of a prefix.

        With a sliding window the caller sees to it that no document is longer (`check_length`).
        """
        attention = packed_attention(
            document_index,
            positions,
            group=self.groups.sdp,
            pieces=pieces,
            implementation=self.config.attention_implementation,
            head_dim=self.config.head_dim,
            dtype=self.model.norm.weight.dtype,
            lengths=lengths,
            visible_until=visible_until,
        )
        hidden_states: Tensor = self.model(tokens, positions, attention)
        if pieces is not None and hidden_states._is_view():
            # The local part of a DTensor: FSDP2, whose output this is, refuses views.
            hidden_states = hidden_states.clone()
        return hidden_states

    def forward(self, batch: BatchKwargs, *, return_logprobs: bool = False) -> HeadOutput:
        """The head's loss and metrics (and log-probabilities) of a packed batch."""
        # Not `self.hidden_states`, which `parallelize` may have wrapped as a forward of its own.
        self.check_length(batch.max_document_length)
        lengths = None
        if batch.max_document_length is not None:
            lengths = DocumentLengths(
                batch.num_documents, batch.max_document_length, batch.host_visible_until
            )
        hidden_states = Llama.hidden_states(
            self,
            batch.tokens,
            batch.positions,
            batch.document_index,
            lengths=lengths,
            visible_until=batch.visible_until,
        )
        output: HeadOutput = self.lm_head(hidden_states, batch, return_logprobs=return_logprobs)
        return output

    def head_output(
        self,
        hidden_states: Tensor,  # [T, D]
        batch: BatchKwargs,
    ) -> HeadOutput:
        """The head's loss and metrics of hidden states that were computed before."""
        output: HeadOutput = self.lm_head(hidden_states, batch)
        return output

    def prefill(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, *, block_size: int = 1
    ) -> tuple[Tensor, KVCache]:  # [B, V]
        """The logits after each prompt, and a cache with room for `max_new_tokens`.

        Prompts may have different lengths but not be empty. To sample a prompt n times, give it
        once and repeat it: `logits.repeat_interleave(n, 0)` and `cache.select(rows)`, with `rows`
        from `torch.arange(B).repeat_interleave(n)`. `block_size` is the cache's: 1 for steps that
        run one by one, more where `decode` is captured in a CUDA graph.

        Raises:
            ValueError: an empty prompt, or none; more tokens than a sliding window has.
        """
        lengths = [len(prompt) for prompt in prompts]
        if not lengths or min(lengths) == 0:
            raise ValueError(f"`prompts` must have at least one token each, got lengths {lengths}")
        longest = max(lengths)
        self.check_length(longest + max_new_tokens)
        padded = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        device = self.model.norm.weight.device
        padding = longest - torch.tensor(lengths, device=device)
        cache = KVCache(padding, longest + max_new_tokens, block_size)
        return self.decode(torch.tensor(padded, device=device), cache), cache

    @torch.no_grad()
    def decode(
        self,
        tokens: Tensor,  # [B, n]
        cache: KVCache,
    ) -> Tensor:  # [B, V]
        """The logits after the last of `tokens`, which are appended to the cache.

            z = cap(logit_scale (h W^T + b)), at least fp32

        the head's logits before its temperature, without padding rows of the vocabulary. Nothing
        waits for the device.
        """
        positions = cache.extend(tokens.shape[1], self.model.norm.weight.dtype)
        with torch.compiler.set_stance("force_eager"):  # a cache has another length in each step
            hidden_states = self.model(tokens.flatten(), positions.flatten(), cache)
        return self._logits(hidden_states.unflatten(0, tokens.shape)[:, -1])

    def _logits(
        self,
        hidden_states: Tensor,  # [B, D]
    ) -> Tensor:  # [B, V]
        head = self.config.head
        logits = matmul(hidden_states, self.lm_head.weight[: self.config.vocab_size].t())
        if self.lm_head.bias is not None:
            logits = logits + self.lm_head.bias[: self.config.vocab_size]
        logits = logits * head.logit_scale
        if head.softcap is not None:
            logits = head.softcap * torch.tanh(logits / head.softcap)
        return logits


def _tie_after_loading(module: nn.Module, _: object) -> None:
    """Ties again after `load_state_dict(assign=True)`, which replaces each name by itself."""
    assert isinstance(module, Llama)
    module.tie_weights()
