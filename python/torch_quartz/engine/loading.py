"""From a name, a folder or a module to a model on the device, its tokenizer and an engine's parts."""

from __future__ import annotations

import os
from typing import Any

import torch

from torch_quartz.engine.config import EngineConfig
from torch_quartz.engine.model_runner import ModelRunner
from torch_quartz.engine.requests import RequestFactory


def load(model: Any, tokenizer: Any, options: dict[str, Any]) -> tuple[EngineConfig, ModelRunner, RequestFactory]:
    """Return configuration, runner and request factory of an engine.

    Parameters
    ----------
    model : str, path or Module
        Of Transformers: a folder, a name of the hub, or a causal language model.
    tokenizer : str, path, object or None
        None: that of the folder or name; a module without one is served with token ids.
    options : dict
        Fields of `EngineConfig`.
    """
    config = EngineConfig(model=model, **options)
    module = load_model(model, config.device, config.dtype)
    if tokenizer is None and not isinstance(model, torch.nn.Module):
        tokenizer = os.fspath(model)
    if isinstance(tokenizer, (str, os.PathLike)):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(os.fspath(tokenizer))
    runner = ModelRunner(module, config)
    runner.allocate()
    factory = RequestFactory(tokenizer, runner.vocab_size, config.max_model_len, eos_token_ids(module, tokenizer))
    return config, runner, factory


def load_model(model: Any, device: Any, dtype: Any) -> torch.nn.Module:
    """Return a causal language model on the device, in evaluation mode.

    Parameters
    ----------
    model : str, path or Module
        See `load`.
    device : str or device
        Where its parameters go.
    dtype : str or dtype
        Of its parameters; "auto" takes the checkpoint's, or the module's as they are.
    """
    if dtype != "auto" and isinstance(dtype, str):
        dtype = getattr(torch, dtype)
    if isinstance(model, torch.nn.Module):
        return (model.to(device) if dtype == "auto" else model.to(device, dtype)).eval()
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(os.fspath(model), dtype=dtype, device_map=str(device)).eval()


def eos_token_ids(model: torch.nn.Module, tokenizer: Any) -> tuple[int, ...]:
    """Return the end tokens of a model and its tokenizer, in order and each once."""
    found: list[int] = []
    for owner in (tokenizer, getattr(model, "generation_config", None), getattr(model, "config", None)):
        value = getattr(owner, "eos_token_id", None)
        found += [] if value is None else [value] if isinstance(value, int) else list(value)
    return tuple(dict.fromkeys(found))
