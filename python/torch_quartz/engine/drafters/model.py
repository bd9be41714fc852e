"""Drafts from a smaller language model of the same vocabulary, with pages of its own in the target's blocks.

Behind each step the draft model runs over that step's rows and the newest token: so it has keys of every token that the
target has keys of, also of prompts that arrive in chunks, and the blocks of the prefix cache hold both. What comes out
at the newest token gives the first draft, and one row a sequence gives each further one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from torch_quartz.engine.drafters import DraftContext, Drafter, KVLayerSpec, Proposal, chain
from torch_quartz.engine.kv_cache import upload
from torch_quartz.engine.paged_context import Overrides, PagedStep

if TYPE_CHECKING:
    from torch_quartz.engine.model_runner import ModelRunner


class ModelDrafter(Drafter):
    """Runs a causal language model of Transformers ahead of the target.

    Parameters
    ----------
    model : str, path or Module
        A folder, a name of the hub, or a model; it may be the target itself.
    max_drafts : int
        Drafts a sequence and step.
    """

    def __init__(self, model: Any, max_drafts: int):
        self.max_drafts = max_drafts
        self._source = model

    def bind(self, runner: ModelRunner) -> None:
        """Load the model onto the target's device and look through it.

        Raises
        ------
        ValueError
            Another vocabulary, or too few positions.
        NotImplementedError
            A model with recurrent layers, or one that the engine does not serve.
        """
        from torch_quartz.engine.head import Head
        from torch_quartz.engine.loading import load_model
        from torch_quartz.engine.model_layout import find_layout, refused, text_config

        model = self._source if self._source is runner.model else load_model(self._source, runner.device, "auto")
        layout = find_layout(model)
        name = type(model).__name__
        if layout.vocab_size != runner.vocab_size:
            raise ValueError(
                f"SpeculativeConfig.model must have the target's vocabulary of {runner.vocab_size} tokens, got {name} "
                f"with {layout.vocab_size}"
            )
        if layout.states:
            raise refused(model, "a draft model with recurrent layers cannot take back what was not accepted")
        limit = getattr(text_config(model), "max_position_embeddings", None)
        length = runner.config.max_model_len
        if limit is not None and length is not None and limit < length:
            raise ValueError(
                f"SpeculativeConfig.model must have at least the {length} positions of EngineConfig.max_model_len, got "
                f"{name} with {limit}"
            )
        self._last_position = (limit or 2**31) - 1
        self._shares = model is runner.model
        self._model, self._base = model, layout.base
        self._head, self._overrides = Head(model, layout.base), Overrides(model)
        self.attention_modules = list(layout.attention)
        self.kv_layers = [
            KVLayerSpec(layer.kv_heads, layer.key_size, layer.value_size, layer.dtype, layer.window)
            for layer in layout.attention.values()
        ]

    def weights(self) -> int:
        """Return the bytes of the draft model's parameters; 0 where it is the target."""
        if self._shares:
            return 0
        return sum(p.numel() * p.element_size() for p in self._model.parameters())

    def propose(self, context: DraftContext) -> Proposal:
        """Return what the model draws behind the newest tokens."""
        output, newest = self._catch_up(context)
        if not context.drawn.any():
            return chain.nothing(context, self.max_drafts)
        logits = self._head(output.last_hidden_state[0].index_select(0, newest), output)

        def forward(number: int, tokens: Tensor) -> Tensor:
            positions = chain.only_drawn(context, context.lengths + number)
            found = self._run(tokens, positions, chain.one_row_step(context, positions))
            return self._head(found.last_hidden_state[0], found)

        return chain.propose(context, self.max_drafts, logits, forward)

    def _catch_up(self, context: DraftContext) -> tuple[Any, Tensor]:
        """Run over the step's rows and one more a sequence; return the output and the rows of the newest tokens.

        With the rows of rejected drafts there are more rows than tokens behind the newest one; no earlier row sees
        them, and the next step writes their places again.
        """
        device, count = context.lengths.device, context.num_seqs
        lens = np.asarray(context.query_lens, np.int64) + 1
        ends = np.cumsum(lens)
        sequence = np.repeat(np.arange(count), lens)
        numbers = upload(
            np.concatenate((sequence, np.arange(len(sequence)) - (ends - lens)[sequence], [0], ends)), device
        )
        row_sequence, offset, starts = numbers.split([len(sequence), len(sequence), count + 1])
        first = context.row_positions.index_select(0, context.query_starts[:-1].long())
        positions = first.index_select(0, row_sequence) + offset
        tokens = context.tokens[
            context.slots.index_select(0, row_sequence), positions.clamp(0, context.tokens.shape[1] - 1)
        ]
        output = self._run(
            tokens.long(), positions, context.step(lens, starts.to(torch.int32), positions, row_sequence)
        )
        behind = torch.minimum((context.lengths - 1 - first).clamp(min=0), starts.diff() - 1)
        return output, starts[:-1] + behind

    def _run(self, tokens: Tensor, positions: Tensor, step: PagedStep) -> Any:
        from torch_quartz.engine.model_layout import call_base

        inside = positions.clamp(0, self._last_position)
        with self._overrides.running(step):
            return call_base(self._base, tokens.unsqueeze(0), inside.unsqueeze(0))


def make(config: Any) -> ModelDrafter:
    """Return the drafter of a `SpeculativeConfig`."""
    return ModelDrafter(config.model, config.num_speculative_tokens)
