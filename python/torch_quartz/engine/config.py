"""What an engine is made with: `EngineConfig` and `SpeculativeConfig`, checked in one place."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

METHODS = ("ngram", "draft_model", "mtp", "dspark")
_POLICIES = ("fcfs", "priority")
_PREEMPTIONS = ("recompute", "swap")
_DEFAULT_SWAP_BYTES = 4 * 2**30
_MAX_DRAFTS = 32  # verify rows of a sequence; acceptance behind that pays nothing


def _refuse(owner: str, field: str, rule: str, value: Any) -> None:
    raise ValueError(f"{owner}.{field} must be {rule}, got {value!r}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass
class SpeculativeConfig:
    """How drafts are made and how many are verified. They change speed, never a token.

    Parameters
    ----------
    method : str
        ``"ngram"`` (what followed the last tokens before), ``"draft_model"``, ``"mtp"`` (the model's own multi-token
        head) or ``"dspark"`` (a block drafter).
    num_speculative_tokens : int
        The most drafts of a sequence and step.
    adaptive : bool
        Whether fewer are verified where their chance to be right does not pay.
    step_times : sequence of float, optional
        For `adaptive`: the time of a step with 0, 1, 2, ... rows. Measured at start if not given.
    model : str, path or Module, optional
        The draft model, or the checkpoint of a drafter.
    prompt_lookup_min, prompt_lookup_max : int
        For ``"ngram"``: lengths of the suffix that is looked for.
    """

    method: str
    num_speculative_tokens: int = 5
    adaptive: bool = False
    step_times: Sequence[float] | None = None
    model: Any = None
    prompt_lookup_min: int = 1
    prompt_lookup_max: int = 4

    def __post_init__(self) -> None:
        owner = "SpeculativeConfig"
        if self.method not in METHODS:
            _refuse(owner, "method", f"one of {list(METHODS)}", self.method)
        if not _is_int(self.num_speculative_tokens) or not 1 <= self.num_speculative_tokens <= _MAX_DRAFTS:
            _refuse(owner, "num_speculative_tokens", f"1 to {_MAX_DRAFTS}", self.num_speculative_tokens)
        if not isinstance(self.adaptive, bool):
            _refuse(owner, "adaptive", "True or False", self.adaptive)
        if self.step_times is not None:
            if not self.adaptive:
                _refuse(owner, "step_times", "left out unless adaptive is True", self.step_times)
            times = [float(time) for time in self.step_times]
            if not times or not all(math.isfinite(time) and time > 0 for time in times):
                _refuse(owner, "step_times", "finite numbers above 0, at least one", self.step_times)
            self.step_times = times
        if self.method in ("draft_model", "dspark") and self.model is None:
            _refuse(owner, "model", f"given for method {self.method!r}", None)
        if self.method == "ngram" and self.model is not None:
            _refuse(owner, "model", "left out for method 'ngram'", self.model)
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        if not _is_int(low) or low < 1:
            _refuse(owner, "prompt_lookup_min", "an integer of at least 1", low)
        if not _is_int(high) or high < low:
            _refuse(owner, "prompt_lookup_max", "an integer of at least prompt_lookup_min", high)


@dataclass
class EngineConfig:
    """Sizes and policies of an engine.

    Parameters
    ----------
    model : str, path or Module
        A folder, a name of the hub, or a causal language model of Transformers.
    device : str or device
        A quartz device.
    dtype : str or dtype
        Of the parameters; "auto" is the checkpoint's.
    max_model_len : int, optional
        The most tokens of a sequence, prompt and output; the model's own limit if not given.
    max_num_seqs : int
        Sequences that run at the same time.
    max_num_batched_tokens : int
        Rows of a step.
    memory_fraction : float
        The share of the device's memory that weights, cache and workspace may take together.
    kv_cache_bytes : int, optional
        Size of the cache, in place of what `memory_fraction` leaves (on the host substrate: of a quarter of the free
        memory, at most 4 GiB).
    num_blocks : int, optional
        Blocks of every group of attention layers, in place of a size in bytes.
    block_size : int
        Tokens of a block.
    enable_prefix_caching : bool
        Whether blocks of finished and running requests serve later ones that begin alike.
    speculative : SpeculativeConfig or dict, optional
        Drafts.
    enforce_eager : bool
        Whether to do without CUDA graphs.
    seed : int, optional
        Of requests without a seed; from the system if not given.
    policy : str
        ``"fcfs"`` or ``"priority"``.
    preemption : str
        What happens to a sequence that has to give its blocks back: ``"recompute"``, or ``"swap"`` to host memory.
    swap_bytes : int, optional
        Host memory for ``"swap"``; 4 GiB if not given.
    overlap : bool
        Whether a step is launched before the tokens of the one before reach the host.
    max_prefill_tokens_per_request : int
        The most prompt tokens of one request in a step; 0 sets no limit beside `max_num_batched_tokens`.
    validate_model : bool
        Whether to prove at start that the engine's logits have the bits of the plain model's.
    """

    model: Any = None
    device: Any = "quartz"
    dtype: Any = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    memory_fraction: float = 0.9
    kv_cache_bytes: int | None = None
    num_blocks: int | None = None
    block_size: int = 16
    enable_prefix_caching: bool = True
    speculative: SpeculativeConfig | Mapping[str, Any] | None = None
    enforce_eager: bool = False
    seed: int | None = None
    policy: str = "fcfs"
    preemption: str = "recompute"
    swap_bytes: int | None = None
    overlap: bool = True
    max_prefill_tokens_per_request: int = 0
    validate_model: bool = True

    def __post_init__(self) -> None:
        self._check_device()
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size"):
            self._at_least(name, 1)
        for name in ("max_model_len", "kv_cache_bytes", "num_blocks", "swap_bytes"):
            if getattr(self, name) is not None:
                self._at_least(name, 2 if name == "max_model_len" else 1)
        self._at_least("max_prefill_tokens_per_request", 0)
        for name in ("enable_prefix_caching", "enforce_eager", "overlap", "validate_model"):
            if not isinstance(getattr(self, name), bool):
                _refuse("EngineConfig", name, "True or False", getattr(self, name))
        if isinstance(self.memory_fraction, bool) or not isinstance(self.memory_fraction, (int, float)):
            _refuse("EngineConfig", "memory_fraction", "a number", self.memory_fraction)
        if not 0 < self.memory_fraction <= 1:
            _refuse("EngineConfig", "memory_fraction", "above 0, up to 1", self.memory_fraction)
        if self.seed is not None and (not _is_int(self.seed) or not -(2**63) <= self.seed < 2**64):
            _refuse("EngineConfig", "seed", "an integer of 64 bits", self.seed)
        if self.policy not in _POLICIES:
            _refuse("EngineConfig", "policy", f"one of {list(_POLICIES)}", self.policy)
        if self.preemption not in _PREEMPTIONS:
            _refuse("EngineConfig", "preemption", f"one of {list(_PREEMPTIONS)}", self.preemption)
        if self.swap_bytes is not None and self.preemption != "swap":
            _refuse("EngineConfig", "swap_bytes", "left out unless preemption is 'swap'", self.swap_bytes)
        if self.swap_bytes is None:
            self.swap_bytes = _DEFAULT_SWAP_BYTES if self.preemption == "swap" else 0
        if isinstance(self.speculative, Mapping):
            try:
                self.speculative = SpeculativeConfig(**self.speculative)
            except TypeError as error:
                raise ValueError(f"EngineConfig.speculative: {error}") from None
        if self.speculative is not None and not isinstance(self.speculative, SpeculativeConfig):
            _refuse("EngineConfig", "speculative", "a SpeculativeConfig, a dict or None", self.speculative)
        if self.max_num_batched_tokens < self.max_drafts + 1:
            _refuse(
                "EngineConfig",
                "max_num_batched_tokens",
                f"at least the {self.max_drafts + 1} rows of a sequence with its drafts",
                self.max_num_batched_tokens,
            )

    @property
    def max_drafts(self) -> int:
        """The most drafts of a sequence and step; 0 without speculation."""
        return self.speculative.num_speculative_tokens if isinstance(self.speculative, SpeculativeConfig) else 0

    def _check_device(self) -> None:
        try:
            device = torch.device(self.device)
        except (RuntimeError, TypeError):
            device = None
        if device is None or device.type != "quartz":
            _refuse("EngineConfig", "device", "a quartz device", self.device)
        if isinstance(self.dtype, str) and self.dtype != "auto":
            found = getattr(torch, self.dtype, None)
            if not isinstance(found, torch.dtype):
                _refuse("EngineConfig", "dtype", "'auto' or the name of a dtype", self.dtype)
        elif not isinstance(self.dtype, (str, torch.dtype)):
            _refuse("EngineConfig", "dtype", "'auto' or a dtype", self.dtype)

    def _at_least(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if not _is_int(value) or value < least:
            _refuse("EngineConfig", name, f"an integer of at least {least}", value)
