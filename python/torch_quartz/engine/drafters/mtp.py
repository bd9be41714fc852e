"""Drafts from the model's own multi-token head: one more decoder layer over hidden states and the next tokens.

The row of a token holds the target's hidden state there and the embedding of the token behind it; norms, a projection,
a decoder layer with keys of its own and the target's head give the logits of the token after that. Further drafts come
from the same layer, given its own hidden state and the draft. The layer is Transformers' ``MtpModel``, which knows the
checkpoints of DeepSeek-V3 and GLM-4.5 (``model.layers.N``, N being the number of layers) and of Qwen3-Next (``mtp.``).

Where a cached prefix ends, the key of its last token holds the token that stood behind it when it was computed; a
prompt that goes on otherwise reads it as it is. That is a matter of drafts, as all here.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torch_quartz.engine.drafters import DraftContext, Drafter, KVLayerSpec, Proposal, chain
from torch_quartz.engine.drafters.checkpoint import read_tensors
from torch_quartz.engine.paged_context import Overrides, PagedStep

if TYPE_CHECKING:
    from torch_quartz.engine.model_runner import ModelRunner

_NORMED = -1  # of Drafter.needs_hidden: the base model's output
_PROBE = 3  # tokens of the pass that finds the attention layer


class MTPDrafter(Drafter):
    """Runs the multi-token head behind the target, its first layer for all drafts.

    Parameters
    ----------
    source : str, path, Module or None
        See `load`.
    max_drafts : int
        Drafts a sequence and step.
    """

    needs_hidden = (_NORMED,)

    def __init__(self, source: Any, max_drafts: int):
        self.max_drafts = max_drafts
        self._source = source

    def bind(self, runner: ModelRunner) -> None:
        """Load the head and look through it.

        Raises
        ------
        ValueError
            A model without such a head, or a checkpoint that lacks it.
        NotImplementedError
            A version of Transformers without it, or a head without attention.
        """
        from torch_quartz.engine.model_layout import refused, watch_attention

        self._runner = runner
        self._head = head = load(self._source, runner.model, runner.device)
        self._overrides = Overrides(head)
        ids = torch.ones(_PROBE, dtype=torch.int64, device=runner.device)
        hidden = torch.ones(_PROBE, runner.layout.hidden_size, device=runner.device, dtype=head.dtype)
        positions = torch.arange(_PROBE, device=runner.device)
        with torch.no_grad():
            attention, _ = watch_attention(
                head, head.config, self._overrides, lambda: self._forward(ids, hidden, positions)
            )
        if len(attention) != 1:
            raise refused(head, f"a multi-token head of one attention layer is, not of {len(attention)}")
        self.attention_modules = list(attention)
        self.kv_layers = [
            KVLayerSpec(layer.kv_heads, layer.key_size, layer.value_size, layer.dtype, layer.window)
            for layer in attention.values()
        ]

    def weights(self) -> int:
        """Return the bytes of the head's own parameters: embeddings and output are the target's."""
        shared = {id(p) for p in self._runner.model.parameters()}
        return sum(p.numel() * p.element_size() for p in self._head.parameters() if id(p) not in shared)

    def propose(self, context: DraftContext) -> Proposal:
        """Return what the head draws behind the newest tokens, one draft behind the other."""
        width = context.tokens.shape[1]
        behind = context.tokens[
            context.slots.index_select(0, context.row_sequence), (context.row_positions + 1).clamp(max=width - 1)
        ]
        hidden = self._run(behind.long(), context.hidden[_NORMED], context.row_positions, context.rows_step())
        if not context.drawn.any():
            return chain.nothing(context, self.max_drafts)
        hidden = hidden.index_select(0, context.last_rows)

        def forward(number: int, tokens: Tensor) -> Tensor:
            nonlocal hidden
            positions = chain.only_drawn(context, context.lengths - 1 + number)
            hidden = self._run(tokens, hidden, positions, chain.one_row_step(context, positions))
            return chain.head_logits(self._runner, hidden)

        return chain.propose(context, self.max_drafts, chain.head_logits(self._runner, hidden), forward)

    def _run(self, tokens: Tensor, hidden: Tensor, positions: Tensor, step: PagedStep) -> Tensor:
        with self._overrides.running(step):
            return self._forward(tokens, hidden, positions)

    def _forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        # Transformers gives a row the position of its token, one behind that of its hidden state.
        return self._head.forward_layer(
            0, hidden.unsqueeze(0), (positions + 1).unsqueeze(0), None, input_ids=tokens.unsqueeze(0)
        )[0]


def load(source: Any, model: Any, device: Any) -> Any:
    """Return the multi-token head of a model, on the device, in evaluation mode.

    Parameters
    ----------
    source : str, path, Module or None
        A checkpoint of the model, or a ``MtpModel`` that shares its embeddings; None is the checkpoint that the model
        was loaded from.
    model : PreTrainedModel
        The target.
    device : device
    """
    try:
        from transformers.modeling_layers import MtpModel
    except ImportError as error:
        raise NotImplementedError(
            "torch_quartz engine: multi-token heads run through Transformers' MtpModel, which this version of "
            "Transformers does not have (5.24 has)"
        ) from error
    if isinstance(source, nn.Module):
        if not isinstance(source, MtpModel):
            raise NotImplementedError(
                "torch_quartz engine: SpeculativeConfig.model for method 'mtp' must be a checkpoint or a MtpModel, got "
                f"{type(source).__name__}"
            )
        return source.to(device, model.dtype).eval()
    name = str(source) if source is not None else model.config.name_or_path
    if not name:
        raise ValueError(
            f"SpeculativeConfig.model must be given for method 'mtp' where the target ({type(model).__name__}) was not "
            "loaded from a checkpoint"
        )
    with _described(model, name):
        try:
            head = MtpModel.from_pretrained(model, device_map={"": device})
        except RuntimeError as error:
            raise ValueError(f"SpeculativeConfig.model must hold the whole multi-token head: {error}") from error
    return head.eval()


@contextlib.contextmanager
def _described(model: Any, name: str) -> Iterator[None]:
    """Let a model's configuration describe the head that lies in a checkpoint, for the time of loading it.

    Transformers knows the heads of some families by the number of layers of their largest members, and not that of
    Qwen3-Next, whose checkpoints say themselves what they hold.
    """
    config = model.config.get_text_config(decoder=True)
    count = config.num_hidden_layers
    layers = getattr(config, "num_mtp_layers", None)
    if layers is None:
        found = read_tensors(name, lambda tensor: tensor.startswith("mtp."))
        layers = len({match[1] for match in map(re.compile(r"mtp\.layers\.(\d+)\.").match, found) if match})
    if not layers:
        raise ValueError(
            f"SpeculativeConfig.method must be another than 'mtp' for a model without a multi-token head, got "
            f"{type(model).__name__} from {name!r}"
        )
    patterns = [rf"(^|\.)layers\.{count + i}\." for i in range(layers)]
    changes: list[tuple[Any, str, Any]] = [
        (model, "_keys_to_ignore_on_load_unexpected", [*patterns, r"^mtp\."]),
        (model.config, "_name_or_path", name),
        (model.config, "dtype", model.dtype),  # may be a name, after saving
        (config, "num_mtp_layers", layers),
    ]
    if getattr(config, "layer_types", None) is not None and getattr(config, "mtp_layer_types", None) is None:
        changes.append((config, "mtp_layer_types", ["full_attention"] * layers))
    if getattr(config, "mlp_layer_types", None) is not None and getattr(config, "mtp_mlp_layer_types", None) is None:
        changes.append((config, "mtp_mlp_layer_types", config.mlp_layer_types[-1:] * layers))
    before = [(owner, field, owner.__dict__.get(field), field in owner.__dict__) for owner, field, _ in changes]
    try:
        for owner, field, value in changes:
            setattr(owner, field, value)
        yield
    finally:
        for owner, field, value, there in before:
            if there:
                owner.__dict__[field] = value
            else:
                owner.__dict__.pop(field, None)


def make(config: Any) -> MTPDrafter:
    """Return the drafter of a `SpeculativeConfig`."""
    return MTPDrafter(config.model, config.num_speculative_tokens)
