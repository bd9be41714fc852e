"""Block drafters of the DSpark and DFlash kind: all drafts of a step from one pass over a block of masks.

The block is the newest token and masks behind it; its rows attend to each other in both directions, and to keys and
values that each layer makes of the target's hidden states at all tokens before. Those lie in pages, written for the
rows of every step, so that the prefix cache holds them too. The block's own keys are written behind them and again, as
tokens' keys, by later steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from torch_quartz.engine.drafters import DraftContext, Drafter, KVLayerSpec, Proposal, chain, dspark_model
from torch_quartz.engine.paged_context import Overrides, PagedStep

if TYPE_CHECKING:
    from torch_quartz.engine.model_runner import ModelRunner

_EMBEDDINGS = -1  # of target_layer_ids
_NORMED = -1  # of Drafter.needs_hidden: the base model's output
_ROPE_OF_POSITION = ("default", "linear", "yarn", "llama3")  # others look at the longest position of a call


class DSparkDrafter(Drafter):
    """Runs a block drafter behind the target.

    Parameters
    ----------
    model : str, path or Module
        See `dspark_model.load`.
    max_drafts : int
        Drafts a sequence and step; at most those of a block, whose rows are all computed.
    """

    def __init__(self, model: Any, max_drafts: int):
        self.max_drafts = max_drafts
        self._source = model

    def bind(self, runner: ModelRunner) -> None:
        """Load the drafter and check that it fits the target.

        Raises
        ------
        ValueError
            Sizes, layers or tokens that the target does not have, or more drafts than a block has.
        NotImplementedError
            See `dspark_model.load`.
        """
        dtype = next(runner.model.parameters()).dtype
        self._model = model = dspark_model.load(self._source, runner.device, dtype)
        config = model.network.config
        self._check(runner, config)
        self._runner = runner
        self._overrides = Overrides(model.network)
        last = len(runner.layout.layers) - 1
        # As Transformers numbers hidden states: behind the last layer they are normed.
        self._taps = [_NORMED if layer == last else layer for layer in model.target_layer_ids if layer != _EMBEDDINGS]
        self.needs_hidden = tuple(dict.fromkeys(self._taps))
        self.lookahead = model.block_size
        self.attention_modules = [layer.self_attn for layer in model.network.layers]
        # Transformers' window of both directions counts keys beside the query's own.
        self.kv_layers = [
            KVLayerSpec(
                config.num_key_value_heads,
                module.head_dim,
                module.head_dim,
                dtype,
                config.sliding_window + 1 if module.is_sliding else None,
            )
            for module in self.attention_modules
        ]

    def _check(self, runner: ModelRunner, config: Any) -> None:
        model, layout = self._model, runner.layout
        if self.max_drafts > model.most_drafts:
            raise ValueError(
                f"SpeculativeConfig.num_speculative_tokens must be at most the {model.most_drafts} drafts of the "
                f"drafter's block, got {self.max_drafts}"
            )
        if config.hidden_size != layout.hidden_size:
            raise ValueError(
                f"SpeculativeConfig.model must have the target's hidden size of {layout.hidden_size}, got "
                f"{config.hidden_size}"
            )
        count = len(layout.layers)
        wrong = [layer for layer in model.target_layer_ids if not _EMBEDDINGS <= layer < count]
        if wrong or not model.target_layer_ids:
            raise ValueError(
                f"SpeculativeConfig.model must name layers of the target, -1 to {count - 1}, got "
                f"target_layer_ids={model.target_layer_ids}"
            )
        rows = runner.model.get_input_embeddings().weight.shape[0]
        if not 0 <= model.mask_token_id < rows:
            raise ValueError(
                f"SpeculativeConfig.model must have a mask token among the target's {rows} embeddings, got "
                f"{model.mask_token_id}"
            )
        if model.markov_head is not None and model.markov_head.markov_w2.out_features != runner.vocab_size:
            raise ValueError(
                f"SpeculativeConfig.model must have a Markov head over the target's {runner.vocab_size} tokens, got "
                f"{model.markov_head.markov_w2.out_features}"
            )
        if "sliding_attention" in config.layer_types and config.sliding_window + 1 < model.block_size:
            raise ValueError(
                f"SpeculativeConfig.model must have a window of at least its block of {model.block_size} rows, got "
                f"{config.sliding_window}"
            )
        kind = (config.rope_parameters or {}).get("rope_type", "default")
        if kind not in _ROPE_OF_POSITION:
            raise NotImplementedError(
                f"torch_quartz engine: a block drafter with rope_type {kind!r} is not served; of {_ROPE_OF_POSITION} is"
            )

    def weights(self) -> int:
        """Return the bytes of the drafter's parameters."""
        return sum(p.numel() * p.element_size() for p in self._model.parameters())

    def propose(self, context: DraftContext) -> Proposal:
        """Return what is drawn from the block's logits, one draft behind the other."""
        hidden = self._run_block(context)
        if not context.drawn.any():
            return chain.nothing(context, self.max_drafts)
        first = self._model.first_row
        hidden = hidden[:, first : first + self.max_drafts]
        base = chain.head_logits(self._runner, hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2])
        newest = self._newest(context)
        drafts = self._draw(context, base, hidden, newest)
        tokens = drafts.drafts.clamp(min=0)
        previous = torch.cat((newest.unsqueeze(1), tokens[:, :-1]), 1)
        return drafts._replace(confidences=self._model.confidences(hidden, previous))

    def _run_block(self, context: DraftContext) -> Tensor:
        """Write keys and values of the step's committed rows; return the block's hidden states, by sequence."""
        size, count, device = self._model.block_size, context.num_seqs, context.lengths.device
        inside = torch.arange(size, device=device)
        first = chain.only_drawn(context, context.lengths - 1).unsqueeze(1)
        positions = torch.where(first >= 0, first + inside, -1).flatten()
        sequences = torch.arange(count, device=device).repeat_interleave(size)
        starts = torch.arange(count + 1, dtype=torch.int32, device=device) * size
        step = context.step(np.full(count, size, np.int64), starts, positions, sequences)
        # Rows of rejected drafts would write where the block does.
        committed = torch.where(context.row_committed, context.row_positions, -1)
        rows = context.step(context.query_lens, context.query_starts, committed, context.row_sequence)
        step.slots = [torch.cat(both) for both in zip(rows.slots, step.slots, strict=True)]
        step.causal = False

        ids = torch.full((count, size), self._model.mask_token_id, dtype=torch.int64, device=device)
        ids[:, 0] = self._newest(context)
        taps = iter(self._taps)
        hidden = [
            self._embed(context.row_tokens) if layer == _EMBEDDINGS else context.hidden[next(taps)]
            for layer in self._model.target_layer_ids
        ]
        return self._forward(
            self._embed(ids.flatten()), torch.cat(hidden, -1), torch.cat((context.row_positions, positions)), step
        ).unflatten(0, (count, size))

    def _forward(self, block: Tensor, hidden: Tensor, positions: Tensor, step: PagedStep) -> Tensor:
        masks = {"full_attention": None, "sliding_attention": None}
        with self._overrides.running(step):
            output = self._model.network(
                noise_embeds=block.unsqueeze(0),
                context_hidden_states=hidden.unsqueeze(0),
                attention_mask=masks,
                position_ids=positions.clamp(min=0).unsqueeze(0),
                use_cache=False,
            )
        return output.last_hidden_state[0]

    def _embed(self, ids: Tensor) -> Tensor:
        embeddings = self._runner.model.get_input_embeddings()
        if hasattr(embeddings, "embed_norm"):  # drafters are given the rows as they are
            return functional.embedding(ids, embeddings.weight)
        return embeddings(ids)

    @staticmethod
    def _newest(context: DraftContext) -> Tensor:
        return context.tokens[context.slots, (context.lengths - 1).clamp(min=0)].long()

    def _draw(self, context: DraftContext, base: Tensor, hidden: Tensor, newest: Tensor) -> Proposal:
        markov = self._model.markov_head
        parameters = context.plain_parameters()
        if markov is not None and markov.kind == "vanilla" and parameters is not None:
            from torch_quartz.ops import markov_draft

            w1, w2 = markov.markov_w1.weight, markov.markov_w2.weight
            drafts, _ = markov_draft(base, w1, w2, newest, positions=context.lengths, **parameters)
            return chain.until_first_missing(drafts)
        state: Tensor | None = None

        def logits(number: int, previous: Tensor) -> Tensor:
            nonlocal state
            if markov is None:
                return base[:, number]
            bias, state = markov(previous, hidden[:, number], state)
            return base[:, number].float() + bias.float()

        return chain.propose(context, self.max_drafts, logits(0, newest), lambda j, tokens: logits(j + 1, tokens))


def make(config: Any) -> DSparkDrafter:
    """Return the drafter of a `SpeculativeConfig`."""
    return DSparkDrafter(config.model, config.num_speculative_tokens)
