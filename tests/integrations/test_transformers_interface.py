"""The attention interfaces "quartz" and "paged|quartz", what models run that choose none, and the way back."""

import inspect

import pytest
import torch
from model_zoo import build
from torch_quartz.testing import same_bits

EAGER_BY_DEFAULT = ["gpt_oss", "deepseek_v4"]


def attention_calls() -> int:
    return torch.quartz.op_counts().get("quartz::attention", (0, 0))[0]


def ids(rows=2, length=9, seed=1):
    return torch.randint(3, 90, (rows, length), generator=torch.Generator().manual_seed(seed)).to("quartz")


def forward(model, **inputs):
    with torch.no_grad():
        return model(use_cache=False, **inputs)


@pytest.mark.parametrize(
    "name", ["llama", "qwen3_moe", "gemma2", "gemma3", "gpt_oss", "deepseek_v3", "deepseek_v4", "gpt2"]
)
def test_by_name(name):
    """Selected when the model is made, or later: the operator runs, and gives what the default gives."""
    model = build(name).to("quartz")
    default = forward(model, input_ids=ids()).logits
    chosen = build(name, attn_implementation="quartz").to("quartz")
    torch.quartz.reset_op_counts()
    logits = forward(chosen, input_ids=ids()).logits
    assert attention_calls() == chosen.config.num_hidden_layers
    model.set_attn_implementation("quartz")
    assert model.config._attn_implementation == "quartz"
    assert same_bits(forward(model, input_ids=ids()).logits, logits)
    if name != "gemma2":  # Transformers before 5.20 leaves the soft cap out of its default
        assert same_bits(default, logits)


def reference(name, **inputs):
    """The logits of the eager model on the CPU. (In float64 its rows without a key are NaN and reach the others.)"""
    model = build(name, attn_implementation="eager")
    with torch.no_grad():
        return model(use_cache=False, **{key: value.cpu() for key, value in inputs.items()}).logits


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("side", ["left", "right", None])
def test_values(name, side):
    """Soft cap, sinks and window against Transformers' own formula, with and without padding."""
    tokens, mask = ids(), torch.ones(2, 9, dtype=torch.int64, device="quartz")
    if side is not None:
        mask[0, slice(3) if side == "left" else slice(6, None)] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    inputs = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}
    got = forward(build(name, attn_implementation="quartz").to("quartz"), **inputs).logits.cpu()
    real = mask.cpu().bool()
    torch.testing.assert_close(got[real], reference(name, **inputs)[real], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", EAGER_BY_DEFAULT)
def test_models_with_their_own_attention_run_the_operator_by_default(name):
    model = build(name).to("quartz")
    assert model.config._attn_implementation == "eager"
    torch.quartz.reset_op_counts()
    logits = forward(model, input_ids=ids()).logits
    assert attention_calls() > 0
    torch.testing.assert_close(logits.cpu(), reference(name, input_ids=ids()), rtol=1e-3, atol=1e-3)


def test_eager_on_request_stays_eager():
    chosen = build("gpt_oss", attn_implementation="eager").to("quartz")
    changed = build("gpt_oss").to("quartz")
    changed.set_attn_implementation("eager")
    torch.quartz.reset_op_counts()
    assert same_bits(forward(chosen, input_ids=ids()).logits, forward(changed, input_ids=ids()).logits)
    assert attention_calls() == 0


def test_weights_of_the_attention_are_given_where_they_are_asked_for():
    model = build("gpt_oss").to("quartz")
    weights = forward(model, input_ids=ids(), output_attentions=True).attentions
    assert len(weights) == 2 and all(isinstance(layer, torch.Tensor) for layer in weights)


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gemma2"])
def test_training(name):
    """Gradients of every parameter against the eager model on the CPU, and the logits of the forward pass without."""
    model = build(name, attn_implementation="quartz").to("quartz")
    tokens, mask = ids(), torch.ones(2, 9, dtype=torch.int64, device="quartz")
    mask[0, :3] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    labels[0, 3] = -100  # a row of padding would predict it
    inputs = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
    output = model(**inputs, use_cache=False)
    output.loss.backward()
    assert same_bits(output.logits[mask.bool()], forward(model, **inputs).logits[mask.bool()])
    plain = build(name, attn_implementation="eager")
    plain(**{key: value.cpu() for key, value in inputs.items()}, use_cache=False).loss.backward()
    for (key, parameter), (_, expected) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        if expected.grad is not None:
            torch.testing.assert_close(parameter.grad.cpu(), expected.grad, rtol=1e-3, atol=1e-4, msg=key)


def test_other_devices():
    model = build("llama", attn_implementation="quartz")
    with torch.no_grad():
        got = model(ids().cpu()).logits
        expected = build("llama", attn_implementation="sdpa")(ids().cpu()).logits
        assert torch.equal(got, expected)
        with pytest.raises(ValueError, match="attention sinks on the device 'quartz' only, got tensors on 'cpu'"):
            build("gpt_oss", attn_implementation="quartz")(ids().cpu())


def test_dropout_with_sinks_is_refused_by_name():
    model = build("gpt_oss", attn_implementation="quartz", attention_dropout=0.1).to("quartz").train()
    with pytest.raises(NotImplementedError, match=r"without dropout.*got dropout 0\.1"):
        model(ids())


@pytest.mark.parametrize("kind", ["holes", "custom"])
def test_masks_of_no_known_form_stay_masks(kind):
    """Padding in the middle of a row, and a mask that the program made, against the eager model."""
    mask = torch.ones(2, 9, dtype=torch.int64, device="quartz")
    mask[0, :2], mask[0, 4:6] = 0, 0
    real = mask.bool().cpu()
    if kind == "custom":
        seen = torch.ones(9, 9, dtype=torch.bool, device="quartz").tril() & mask.bool()[:, None, None]
        mask = torch.zeros(2, 1, 9, 9, device="quartz").masked_fill(~seen, torch.finfo(torch.float32).min)
    for name in ("llama", "gpt_oss") if kind == "holes" else ("llama",):
        got = forward(build(name).to("quartz"), input_ids=ids(), attention_mask=mask).logits.cpu()
        expected = reference(name, input_ids=ids(), attention_mask=mask)
        torch.testing.assert_close(got[real], expected[real], rtol=1e-3, atol=1e-3)


def test_disable_restores_everything():
    import transformers.masking_utils as masks
    from torch_quartz.integrations import patches, transformers
    from transformers.generation.continuous_batching import cache, continuous_api
    from transformers.modeling_utils import AttentionInterface, PreTrainedModel

    def state():
        return (
            dict(AttentionInterface._global_mapping),
            dict(masks.AttentionMaskInterface._global_mapping),
            AttentionInterface.get_interface,
            PreTrainedModel.get_correct_attn_implementation,
            PreTrainedModel.set_attn_implementation,
            cache.PagedAttentionCache.update,
            continuous_api.ContinuousBatchingManager.switch_to_cb_friendly_attn,
        )

    before = state()
    model = build("gpt_oss").to("quartz")
    transformers.disable()
    try:
        original = state()
        assert "quartz" not in original[0] and "quartz" not in original[1]
        assert not any(function in before[2:5] for function in original[2:5])
        assert not any(name.startswith("transformers") for name in patches.installed())
        torch.quartz.reset_op_counts()
        assert forward(model, input_ids=ids()).logits.isfinite().all() and attention_calls() == 0
        with pytest.raises(ValueError, match="quartz"):
            build("llama", attn_implementation="quartz")
    finally:
        from torch_quartz import install_patches

        install_patches()
    assert "quartz" in state()[0]
    build("llama", attn_implementation="quartz")


# ---- continuous batching ----

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13, 14], [15] * 20, list(range(3, 60))]
NEW = 12


def batched(model, **options):
    """Tokens and log probabilities of each prompt, through the paged cache with chunked prompts."""
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    page = "page_size" if "page_size" in inspect.signature(ContinuousBatchingConfig).parameters else "block_size"
    outputs = model.generate_batch(
        inputs=PROMPTS,
        generation_config=GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(
            num_blocks=32, max_batch_tokens=32, use_cuda_graph=False, return_logprobs=True, **{page: 16}, **options
        ),
        progress_bar=False,
    )
    answers = sorted(outputs.values(), key=lambda output: len(output.prompt_ids))
    assert not any(answer.error for answer in answers)
    return [(answer.generated_tokens, list(answer.logprobs)) for answer in answers]


def alone(model):
    """The same without a paged cache, one prompt at a time."""
    answers = []
    for prompt in PROMPTS:
        inputs = torch.tensor([prompt], device="quartz")
        output = model.generate(
            input_ids=inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
        )
        best = [score.float().softmax(-1).amax(-1).log().item() for score in output.scores]
        answers.append((output.sequences[0, len(prompt) :].tolist(), best))
    return answers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss", "qwen3_moe"])
@pytest.mark.parametrize("implementation", [None, "quartz", "paged|quartz"])
def test_continuous_batching_gives_the_tokens_and_bits_of_the_plain_path(name, dtype, implementation):
    model = build(name).to("quartz", dtype)
    chosen = model.config._attn_implementation
    expected = alone(model)
    if implementation is not None:
        model.set_attn_implementation(implementation)
    torch.quartz.reset_op_counts()
    got = batched(model)
    counts = torch.quartz.op_counts()
    assert counts["quartz::paged_attention"][0] > 0 and counts["quartz::write_kv"][0] > 0
    assert got == expected
    if implementation is None:
        assert model.config._attn_implementation == chosen  # as it was before


def test_paged_attention_without_its_cache_is_refused():
    from transformers.modeling_utils import AttentionInterface

    model = build("llama").to("quartz")
    model.set_attn_implementation("paged|quartz")
    if model.config._attn_implementation == "quartz":  # newer Transformers take the prefix off: a plain forward pass
        assert forward(model, input_ids=ids()).logits.isfinite().all()
        assert "paged|quartz" in AttentionInterface._global_mapping
        return
    with pytest.raises(ValueError, match="needs the paged cache of continuous batching"):
        forward(model, input_ids=ids())
