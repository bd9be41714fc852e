"""From hidden states to logits, as the model itself does it: its head, and whatever it does behind the head."""

from __future__ import annotations

import copy
import threading
from typing import Any

import torch
from torch import Tensor, nn

from torch_quartz.engine.paged_context import lock_of


class Head:
    """Computes logits of any rows of hidden states.

    The causal model's own forward runs with the base model left out, so that soft caps, scales and conversions are its
    own. Where that gives the bits of the output embedding alone, only that runs.

    Parameters
    ----------
    model : PreTrainedModel
    base : Module
        The part that computes hidden states.
    """

    def __init__(self, model: Any, base: nn.Module):
        self._model = model
        self._base = base
        self._output = model.get_output_embeddings()
        self._plain: bool | None = None

    def __call__(self, hidden: Tensor, output: Any) -> Tensor:
        """Return logits.

        Parameters
        ----------
        hidden : Tensor
            ``(rows, hidden size)``, of the base model.
        output : object
            What the base model returned for some rows.

        Returns
        -------
        Tensor
            ``(rows, vocabulary)``.
        """
        if self._plain is None:
            self._plain = self._is_plain(hidden, output)
        return self._output(hidden) if self._plain else self._whole(hidden, output)

    def _whole(self, hidden: Tensor, output: Any) -> Tensor:
        given = copy.copy(output)
        given["last_hidden_state"] = hidden.unsqueeze(0)
        attributes = self._base.__dict__
        with lock_of(self._model):
            return self._replaced(attributes, given, hidden)

    def _replaced(self, attributes: dict[str, Any], given: Any, hidden: Tensor) -> Tensor:
        before, thread, plain = attributes.get("forward"), threading.get_ident(), self._base.forward

        def forward(*arguments: Any, **options: Any) -> Any:
            return given if threading.get_ident() == thread else plain(*arguments, **options)

        attributes["forward"] = forward
        try:
            ids = torch.zeros(1, hidden.shape[0], dtype=torch.int64, device=hidden.device)
            return self._model(input_ids=ids, use_cache=False).logits[0]
        finally:
            if before is None:
                del attributes["forward"]
            else:
                attributes["forward"] = before

    def _is_plain(self, hidden: Tensor, output: Any) -> bool:
        # Large values show soft caps and scales.
        generator = torch.Generator().manual_seed(0)
        size = (4, hidden.shape[-1])
        rows = (torch.randn(size, generator=generator) * 30).to(hidden.device, hidden.dtype)
        try:
            own = self._output(rows)
        except RuntimeError:  # a head of another dtype
            return False
        whole = self._whole(rows, output)
        return own.dtype == whole.dtype and torch.equal(own, whole)
