"""gpt-oss checkpoints of MXFP4: the experts keep their codes, the results are those of the dequantised model."""

import json

import pytest
import torch
from torch_quartz import ops
from torch_quartz.testing import same_bits

transformers = pytest.importorskip("transformers", minversion="5.0")
safetensors_torch = pytest.importorskip("safetensors.torch")
pytest.importorskip("accelerate")


def save(folder):
    """A tiny random gpt-oss and its MXFP4 checkpoint."""
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=128,
        num_local_experts=4,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    tensors = safetensors_torch.load_file(folder / "model.safetensors")
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        packed, scales = ops.quantize_mxfp4(tensors.pop(name).float().transpose(1, 2).contiguous() * 16)
        tensors[f"{name}_blocks"] = packed.unflatten(-1, (-1, 16)).contiguous()
        tensors[f"{name}_scales"] = scales.view(torch.uint8) - 4
    safetensors_torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    stored = json.loads((folder / "config.json").read_text())
    stored["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(stored))


def load(folder, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options).eval()


def test_experts_keep_their_codes(tmp_path):
    save(tmp_path)
    model = load(tmp_path, device_map="quartz")
    experts = model.model.layers[1].mlp.experts
    assert experts.down_proj_blocks.dtype == torch.uint8 and experts.down_proj_blocks.shape == (4, 64, 2, 16)
    assert experts.down_proj_bias.dtype == torch.bfloat16
    assert all(p.device.type == "quartz" for p in model.parameters())
    ids = torch.randint(0, 128, (2, 9), generator=torch.Generator().manual_seed(1)).to("quartz")
    plain = load(tmp_path, device_map="quartz", quantization_config=transformers.Mxfp4Config(dequantize=True))
    assert plain.model.layers[1].mlp.experts.down_proj.dtype == torch.bfloat16
    with torch.no_grad():
        got = model(ids).logits
        assert got.isfinite().all() and same_bits(got, plain(ids).logits)  # MXFP4 is exact in bfloat16
        assert same_bits(model(ids[:1]).logits, got[:1])
        assert same_bits(model(ids[:, :4]).logits, got[:, :4])
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape == (2, 12)

    model.save_pretrained(tmp_path / "again")
    with torch.no_grad():
        assert same_bits(load(tmp_path / "again", device_map="quartz")(ids).logits, got)


def test_other_devices_dequantise_as_before(tmp_path):
    save(tmp_path)
    model = load(tmp_path, device_map="cpu")
    assert model.model.layers[0].mlp.experts.down_proj.dtype == torch.bfloat16
