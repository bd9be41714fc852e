"""The modules of block drafters: a network over a block of masks, a Markov head and a confidence head.

The network (a few layers of attention whose keys and values come from hidden states of the target, then from the block
itself) is Transformers' ``MuseGlimmerAssistantModel``. Checkpoints of DeepSpec hold the same network under other names,
and the two heads; DFlash is the network without them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torch_quartz.engine.drafters.checkpoint import read_tensors

MARKOV_KINDS = ("vanilla", "gated", "rnn")
# Copies of the target's, which are frozen in training: the target's own are used.
_SHARED = ("embed_tokens.weight", "lm_head.weight")
_RENAMED = {"fc.": "network.encoder.fc.", "hidden_norm.": "network.encoder.output_norm_enc."}
_DEEPSPEC = "Qwen3DSparkModel"


class MarkovHead(nn.Module):
    """Adds to the logits of a draft what the token before it says: ``W1[previous] . W2^T``, of low rank.

    Parameters
    ----------
    vocab_size, rank, hidden_size : int
    kind : str
        ``"vanilla"``; ``"gated"``: the row of W1 is scaled by a gate of itself and the hidden state; ``"rnn"``: a
        gated state goes along the block in its place.
    """

    def __init__(self, vocab_size: int, rank: int, hidden_size: int, kind: str = "vanilla"):
        super().__init__()
        if kind not in MARKOV_KINDS:
            raise ValueError(f"DSpark: markov_head_type must be one of {list(MARKOV_KINDS)}, got {kind!r}")
        self.kind = kind
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(hidden_size + rank, rank)
        elif kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def forward(self, previous: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return what is added to the logits, and the state for the next token.

        Parameters
        ----------
        previous : Tensor
            ``(rows,)``, int64.
        hidden : Tensor
            ``(rows, hidden size)``: the network's, of the draft.
        state : Tensor or None
            Of the token before; None for the first.
        """
        row = self.markov_w1(previous)
        if self.kind == "gated":
            row = torch.sigmoid(self.gate_proj(torch.cat((hidden, row), -1))) * row
        elif self.kind == "rnn":
            state = torch.zeros_like(row) if state is None else state
            gate, candidate, output = self.joint_proj(torch.cat((state, row, hidden), -1)).chunk(3, -1)
            gate = torch.sigmoid(gate)
            state = gate * state + (1 - gate) * torch.tanh(candidate)
            row = torch.tanh(output)
        return self.markov_w2(row), state


class DSparkModel(nn.Module):
    """A block drafter without the embeddings and head that it shares with its target.

    Parameters
    ----------
    network : Module
        ``MuseGlimmerAssistantModel`` of Transformers.
    markov : MarkovHead, optional
    confidence : Linear, optional
        Of the hidden state alone, or of it and the token's row of W1.
    first_row : int
        The row of the block whose logits the first draft is drawn from: 0, the newest token's (DeepSpec), or 1, the
        first mask's (Transformers).

    Attributes
    ----------
    block_size, mask_token_id : int
    target_layer_ids : list of int
        Taps; -1 is the target's embeddings.
    """

    def __init__(
        self,
        network: Any,
        markov: MarkovHead | None = None,
        confidence: nn.Linear | None = None,
        first_row: int = 0,
    ):
        super().__init__()
        self.network = network
        self.markov_head = markov
        self.confidence_head = confidence
        self.first_row = first_row
        config = network.config
        self.block_size = int(config.block_size)
        self.mask_token_id = int(config.mask_token_id)
        self.target_layer_ids = [int(layer) for layer in config.target_layer_ids]

    @property
    def most_drafts(self) -> int:
        """Drafts that a block has."""
        return self.block_size - self.first_row

    def confidences(self, hidden: Tensor, previous: Tensor) -> Tensor | None:
        """Return the chance of each draft to be right, given that those before it are; None without such a head.

        Parameters
        ----------
        hidden : Tensor
            ``(rows, drafts, hidden size)``.
        previous : Tensor
            ``(rows, drafts)``: the token before each draft.
        """
        if self.confidence_head is None:
            return None
        features = hidden
        if self.confidence_head.in_features > hidden.shape[-1]:
            assert self.markov_head is not None
            features = torch.cat((hidden, self.markov_head.markov_w1(previous).to(hidden.dtype)), -1)
        logits = self.confidence_head(features)[..., 0]
        return torch.sigmoid(logits.float()).nan_to_num(0.0)


def _assistant() -> tuple[type, type]:
    try:
        from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
    except ImportError as error:
        raise NotImplementedError(
            "torch_quartz engine: block drafters run through Transformers' MuseGlimmerAssistantModel, which this "
            "version of Transformers does not have (5.24 has)"
        ) from error
    return MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel


def from_config(config: Any) -> DSparkModel:
    """Return a block drafter of a DeepSpec configuration, with weights as initialised.

    Parameters
    ----------
    config : PreTrainedConfig
        Of Qwen3, with the fields of a DeepSpec checkpoint: target_layer_ids, mask_token_id, block_size, markov_rank,
        markov_head_type, enable_confidence_head, confidence_head_with_markov.

    Raises
    ------
    NotImplementedError
        Layers that the network does not have.
    """
    config_class, network_class = _assistant()
    if getattr(config, "attention_bias", False):
        raise NotImplementedError("torch_quartz engine: a DSpark drafter with biases in its attention is not served")
    rope = dict(config.rope_parameters or {})
    fields = (
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
        *("head_dim", "rms_norm_eps", "max_position_embeddings", "hidden_act", "block_size", "mask_token_id"),
        *("target_layer_ids", "layer_types"),
    )
    given = {name: getattr(config, name) for name in fields if getattr(config, name, None) is not None}
    if getattr(config, "sliding_window", None):
        given["sliding_window"] = config.sliding_window
    network = network_class(config_class(**given, rope_parameters=rope))
    rank, hidden = int(getattr(config, "markov_rank", 0)), config.hidden_size
    markov = MarkovHead(config.vocab_size, rank, hidden, str(config.markov_head_type)) if rank else None
    confidence = None
    if getattr(config, "enable_confidence_head", False):
        confidence = nn.Linear(hidden + (rank if config.confidence_head_with_markov else 0), 1)
    return DSparkModel(network, markov, confidence)


def load(source: Any, device: Any, dtype: torch.dtype) -> DSparkModel:
    """Return a block drafter on the device, in evaluation mode.

    Parameters
    ----------
    source : str, path or Module
        A checkpoint of DeepSpec or of ``muse_glimmer_assistant`` (folder, or name of the hub); a `DSparkModel` or a
        ``MuseGlimmerAssistantModel``.
    device : device
    dtype : dtype
        Of its parameters.

    Raises
    ------
    NotImplementedError
        Another kind of drafter.
    ValueError
        Tensors that are missing, or of a shape or name that the configuration does not have.
    """
    _, network_class = _assistant()
    if isinstance(source, network_class):
        source = DSparkModel(source, first_row=1)
    if isinstance(source, DSparkModel):
        return source.to(device, dtype).eval()
    if isinstance(source, nn.Module):
        raise NotImplementedError(
            "torch_quartz engine: SpeculativeConfig.model for method 'dspark' must be a checkpoint, a DSparkModel or a "
            f"MuseGlimmerAssistantModel, got {type(source).__name__}"
        )
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(source)
    if config.model_type == "muse_glimmer_assistant":
        network = network_class.from_pretrained(source, dtype=dtype)
        return DSparkModel(network, first_row=1).to(device).eval()
    architectures = getattr(config, "architectures", None) or []
    if _DEEPSPEC not in architectures:
        raise NotImplementedError(
            f"torch_quartz engine: block drafters of {_DEEPSPEC} and muse_glimmer_assistant are served, got "
            f"{architectures or config.model_type} in {source!r}"
        )
    model = from_config(config)
    tensors = {_renamed(k): v for k, v in read_tensors(source, lambda name: name not in _SHARED).items()}
    missing, unknown = (sorted(a - b) for a, b in _both_ways(set(model.state_dict()), set(tensors)))
    if missing or unknown:
        raise ValueError(
            f"DSpark: the checkpoint {source!r} must hold the tensors of its configuration, got without {missing[:4]} "
            f"and with {unknown[:4]}"
        )
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:  # shapes
        raise ValueError(f"DSpark: the checkpoint {source!r} does not fit its configuration: {error}") from None
    return model.to(device, dtype).eval()


def _renamed(name: str) -> str:
    for old, new in _RENAMED.items():
        if name.startswith(old):
            return new + name[len(old) :]
    if name.startswith(("layers.", "norm.")):
        return f"network.{name}"
    return name.replace("confidence_head.proj.", "confidence_head.")


def _both_ways(one: set[str], other: set[str]) -> tuple[tuple[set[str], set[str]], tuple[set[str], set[str]]]:
    return (one, other), (other, one)
