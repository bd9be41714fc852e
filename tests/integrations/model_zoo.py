"""Tiny random models of many architectures, and one runner that records what each computes on a device.

The table names every architecture with a configuration of two small layers. `run_case` builds the model on the CPU from
a fixed seed, moves it, and returns everything it computed (logits, loss, every gradient, generated tokens and their
scores) as CPU tensors. Both sides of a comparison use this one function, so that they cannot differ by accident
(transformers_jobs.py has the other side).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")

VOCABULARY = 96
SEED = 1234
NEW_TOKENS = 6
_IMAGE_TOKEN = VOCABULARY - 2

# What most decoder-only configurations accept; entries below override single values.
_DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


@dataclass(frozen=True)
class Case:
    """One architecture of the zoo.

    Parameters
    ----------
    model_type : str
        The key of the configuration in Transformers (``AutoConfig.for_model``).
    head : str
        The auto class that builds the model.
    config : dict
        Keyword arguments of the configuration.
    inputs : callable
        Returns the keyword arguments of ``forward`` (CPU tensors, labels included).
    prompt : tuple of str
        Names of the inputs that ``generate`` receives; empty where the model does not generate.
    """

    model_type: str
    head: str
    config: dict[str, Any]
    inputs: Callable[[], dict[str, torch.Tensor]]
    prompt: tuple[str, ...] = ()
    generate: dict[str, Any] = field(default_factory=dict)


def _tokens(rows: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(SEED))


def _text() -> dict[str, torch.Tensor]:
    ids = _tokens()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def _image() -> dict[str, torch.Tensor]:
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(SEED))
    return {"pixel_values": pixels, "labels": torch.tensor([1, 0])}


def _image_and_text() -> dict[str, torch.Tensor]:
    # One image per row: 4 x 4 patches of 2 frames x 3 channels x 2 x 2 pixels, merged by 2 x 2 into four tokens.
    inputs = _text()
    inputs["input_ids"] = inputs["input_ids"].clamp(max=_IMAGE_TOKEN - 1)
    inputs["input_ids"][:, 2:6] = _IMAGE_TOKEN
    inputs["pixel_values"] = torch.randn(32, 24, generator=torch.Generator().manual_seed(SEED))
    inputs["image_grid_thw"] = torch.tensor([[1, 4, 4], [1, 4, 4]])
    return inputs


def _speech() -> dict[str, torch.Tensor]:
    # Whisper asks for exactly two feature frames per source position (a convolution of stride 2).
    frames = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(SEED))
    return {"input_features": frames, "labels": _tokens(2, 6)}


def _sequence_pair() -> dict[str, torch.Tensor]:
    ids = _tokens()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": _tokens(2, 6)}


def _decoder(model_type: str, **changes: Any) -> Case:
    config = {key: value for key, value in {**_DECODER, **changes}.items() if value is not _ABSENT}
    return Case(model_type, "AutoModelForCausalLM", config, _text, ("input_ids", "attention_mask"))


_ABSENT = object()  # removes an entry of _DECODER that a configuration would refuse or misread
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1}

_CASES = {
    "llama": _decoder("llama"),
    "qwen3": _decoder("qwen3"),
    "qwen3_moe": _decoder("qwen3_moe", **_EXPERTS),
    "qwen3_next": _decoder(
        "qwen3_next",
        **_EXPERTS,
        shared_expert_intermediate_size=16,
        layer_types=["linear_attention", "full_attention"],
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
    ),
    "gemma2": _decoder("gemma2", sliding_window=4, query_pre_attn_scalar=8),
    "gemma3": _decoder(
        "gemma3_text",
        sliding_window=4,
        query_pre_attn_scalar=8,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "gpt_oss": _decoder("gpt_oss", num_local_experts=4, num_experts_per_tok=2, sliding_window=4),
    "mixtral": _decoder("mixtral", num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "deepseek_v3": _decoder(
        "deepseek_v3",
        **_ROUTED,
        head_dim=_ABSENT,
        num_key_value_heads=4,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        qk_nope_head_dim=8,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
    ),
    "deepseek_v4": _decoder(
        "deepseek_v4",
        **_ROUTED,
        intermediate_size=_ABSENT,
        num_key_value_heads=1,
        head_dim=16,
        q_lora_rank=8,
        o_lora_rank=8,
        o_groups=2,
        index_n_heads=2,
        index_head_dim=16,
        index_topk=4,
        partial_rotary_factor=0.5,
        layer_types=["heavily_compressed_attention", "compressed_sparse_attention"],
        compress_rates={"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        mlp_layer_types=["hash_moe", "moe"],
        sliding_window=4,
        hc_mult=2,
    ),
    "glm4_moe": _decoder("glm4_moe", **_ROUTED, first_k_dense_replace=1, use_qk_norm=True),
    "muse_glimmer": Case(
        "muse_glimmer",
        "AutoModelForImageTextToText",
        {
            "text_config": {
                **_DECODER,
                "sliding_window": 4,
                "layer_types": ["sliding_attention", "full_attention"],
                "layer_rope_theta": [10000.0, 0.0],
            },
            "vision_config": {
                "patch_size": 2,
                "pos_emb_height": 8,
                "pos_emb_width": 8,
                "num_attention_heads": 2,
                "num_hidden_layers": 2,
                "hidden_size": 16,
                "intermediate_size": 32,
                "layer_types": ["full_attention", "full_attention"],
            },
            "image_token_id": _IMAGE_TOKEN,
            "video_token_id": _IMAGE_TOKEN + 1,
            "out_hidden_size": 64,  # 4 merged patches of 16
            "projector_hidden_size": 32,
        },
        _image_and_text,
        ("input_ids", "attention_mask", "pixel_values", "image_grid_thw"),
    ),
    "mamba": _decoder(
        "mamba",
        intermediate_size=_ABSENT,
        num_attention_heads=_ABSENT,
        num_key_value_heads=_ABSENT,
        head_dim=_ABSENT,
        max_position_embeddings=_ABSENT,
        state_size=8,
        time_step_rank=4,
    ),
    "gpt2": Case(
        "gpt2",
        "AutoModelForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "bos_token_id": 1,
            "eos_token_id": None,
        },
        _text,
        ("input_ids", "attention_mask"),
    ),
    "bert": Case(
        "bert",
        "AutoModelForMaskedLM",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "max_position_embeddings": 64,
        },
        _text,
    ),
    "vit": Case(
        "vit",
        "AutoModelForImageClassification",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "image_size": 16,
            "patch_size": 4,
        },
        _image,
    ),
    "whisper": Case(
        "whisper",
        "AutoModelForSpeechSeq2Seq",
        {
            "vocab_size": VOCABULARY,
            "num_mel_bins": 8,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "max_source_positions": 16,
            "max_target_positions": 32,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
        _speech,
        ("input_features",),
    ),
    "t5": Case(
        "t5",
        "AutoModelForSeq2SeqLM",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
            "pad_token_id": 0,
            "eos_token_id": 2,
        },
        _sequence_pair,
        ("input_ids", "attention_mask"),
    ),
}

# The architectures of the issue that every supported Transformers version must bring.
REQUIRED = (
    *("llama", "qwen3", "qwen3_moe", "qwen3_next", "gemma3", "gpt_oss", "mixtral", "deepseek_v3", "deepseek_v4"),
    *("glm4_moe", "muse_glimmer", "bert", "vit", "whisper", "t5", "mamba"),
)


def available() -> list[str]:
    """Return the names of the zoo that the installed Transformers knows."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return [name for name, case in _CASES.items() if case.model_type in CONFIG_MAPPING]


def case(name: str) -> Case:
    """Return the table's entry of that name."""
    return _CASES[name]


def build(name: str, **changes: Any) -> torch.nn.Module:
    """Build the model of that name on the CPU in float32 from the fixed seed.

    Parameters
    ----------
    name : str
        A key of the table.
    **changes
        Configuration values to replace.
    """
    import transformers

    entry = _CASES[name]
    config = transformers.AutoConfig.for_model(entry.model_type, **{**entry.config, **changes})
    torch.manual_seed(SEED)
    model = getattr(transformers, entry.head).from_config(config)
    with torch.no_grad():  # buffers such as DeepSeek-V4's hash routing table start as zeros or uninitialised
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("tid2eid"):
                buffer.copy_(torch.randint(0, entry.config["n_routed_experts"], buffer.shape))
    return model.eval()


def without_dropout(name: str) -> dict[str, float]:
    """Return the configuration values that switch a model's dropout off.

    The native device draws other masks than quartz, so that only models without it can be compared.

    Parameters
    ----------
    name : str
        A key of the table.
    """
    import transformers

    config = transformers.AutoConfig.for_model(_CASES[name].model_type, **_CASES[name].config)
    return {key: 0.0 for key, value in config.to_dict().items() if _is_dropout(key) and isinstance(value, float)}


def _is_dropout(key: str) -> bool:
    return "dropout" in key or key.endswith("_pdrop")


def to_cpu(value: Any) -> torch.Tensor:
    """Return a detached CPU copy of a tensor."""
    return value.detach().to("cpu", copy=True)


def run_case(name: str, device: str, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Run forward, backward and (where the model has it) generate of one case on a device.

    Parameters
    ----------
    name : str
        A key of the table.
    device : str
        Where the model runs, for example ``"cpu"``, ``"cuda"`` or ``"quartz"``.
    dtype : torch.dtype
        The type of the parameters.

    Returns
    -------
    dict of str to torch.Tensor
        ``"logits"``, ``"loss"``, ``"grad.<parameter>"``, ``"tokens"`` and ``"score.<step>"``, all on the CPU.
    """
    entry = _CASES[name]
    model = build(name, **without_dropout(name)).to(device, dtype)
    inputs = {
        key: value.to(device, dtype if value.is_floating_point() else None) for key, value in entry.inputs().items()
    }
    results: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        results["logits"] = to_cpu(model(**inputs).logits)
    model.train()
    loss = model(**inputs).loss
    loss.backward()
    results["loss"] = to_cpu(loss)
    for parameter_name, parameter in model.named_parameters():
        if parameter.grad is not None:
            results[f"grad.{parameter_name}"] = to_cpu(parameter.grad)
    model.eval()
    if entry.prompt:
        output = model.generate(
            **{key: inputs[key] for key in entry.prompt},
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
            **entry.generate,
        )
        results["tokens"] = to_cpu(output.sequences)
        for step, score in enumerate(output.scores):
            results[f"score.{step}"] = to_cpu(score)
    return results
