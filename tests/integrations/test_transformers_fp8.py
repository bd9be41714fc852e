"""Float8 checkpoints of Transformers: the weights stay float8, the results are those of the dequantised model."""

import json

import pytest
import torch
from torch_quartz import ops
from torch_quartz.integrations import patches
from torch_quartz.testing import same_bits

transformers = pytest.importorskip("transformers", minversion="5.0")
safetensors_torch = pytest.importorskip("safetensors.torch")
pytest.importorskip("accelerate")

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "tie_word_embeddings": False,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}


def save(folder, moe, block):
    """A tiny random model and its float8 checkpoint, in blocks or with one scale a matrix."""
    torch.manual_seed(0)
    kind = transformers.Qwen3MoeConfig if moe else transformers.Qwen3Config
    config = kind(**SIZES, **(MOE if moe else {}))
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    tensors = safetensors_torch.load_file(folder / "model.safetensors")
    for name, w in list(tensors.items()):
        if w.dim() != 2 or not name.endswith("proj.weight"):
            continue
        codes, scales = ops.quantize_fp8(w.float() * 20, "block", block) if block else ops.quantize_fp8(w.float() * 20)
        tensors[name], tensors[f"{name}_scale_inv"] = codes, scales / 20
    safetensors_torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    stored = json.loads((folder / "config.json").read_text())
    stored["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [block, block] if block else None,
        "modules_to_not_convert": ["lm_head"] + [f"model.layers.{i}.mlp.gate" for i in range(2) if moe],
    }
    (folder / "config.json").write_text(json.dumps(stored))


def load(folder, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options).eval()


def bytes_of(model):
    return {p.dtype for n, p in model.named_parameters() if n.endswith(("_proj.weight", "experts.down_proj"))}


@pytest.mark.parametrize("moe", [False, True])
@pytest.mark.parametrize("block", [32, 128])
def test_float8_weights_stay_and_results_are_those_of_the_dequantised_model(tmp_path, moe, block):
    save(tmp_path, moe, block)
    model = load(tmp_path, device_map="quartz")
    assert bytes_of(model) == {torch.float8_e4m3fn}
    assert all(p.device.type == "quartz" for p in model.parameters())
    ids = torch.randint(0, 128, (2, 9), generator=torch.Generator().manual_seed(1)).to("quartz")
    torch.quartz.reset_op_counts()
    with torch.no_grad():
        got = model(ids).logits
    counts = torch.quartz.op_counts()
    assert any("linear_quantized" in str(name) for name in counts)
    assert not moe or any("moe_experts_quantized" in str(name) for name in counts)

    config = transformers.FineGrainedFP8Config(
        weight_block_size=(block, block), dequantize=True, modules_to_not_convert=["lm_head"]
    )
    plain = load(tmp_path, device_map="quartz", quantization_config=config)
    assert torch.float8_e4m3fn not in bytes_of(plain)
    with torch.no_grad():
        torch.testing.assert_close(got, plain(ids).logits, rtol=2e-2, atol=2e-2)
        assert same_bits(model(ids[:1]).logits, got[:1])  # a row does not see the other
        assert same_bits(model(ids[:, :4]).logits, got[:, :4])
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape == (2, 12)


def test_gradients_of_the_input(tmp_path):
    save(tmp_path, False, 32)
    model = load(tmp_path, device_map="quartz")
    model.requires_grad_(False)
    embeddings = torch.randn(1, 5, 64, dtype=torch.bfloat16).to("quartz").requires_grad_()
    model(inputs_embeds=embeddings).logits.float().square().mean().backward()
    assert embeddings.grad.isfinite().all() and embeddings.grad.abs().sum() > 0


def test_without_the_patches_weights_are_dequantised_as_before(tmp_path):
    if torch.cuda.is_available():
        return  # there Transformers takes CUDA for the model's device
    save(tmp_path, False, 32)
    patches.undo("transformers_fp8")
    try:
        assert torch.float8_e4m3fn not in bytes_of(load(tmp_path, device_map="quartz"))
    finally:
        patches.install_all()
    model = load(tmp_path, device_map="cpu")  # other devices: as before
    assert torch.float8_e4m3fn not in bytes_of(model)
