"""RMS norms, gated MLPs, rotary embeddings and routers of Transformers' models on quartz run the fused operators."""

import contextlib
import copy
import pathlib
import sys

import model_zoo
import pytest
import torch
from torch_quartz.integrations import patches, transformers, transformers_fused
from torch_quartz.testing import same_bits

# Family -> which fused operators a forward pass of its tiny model must call.
NORM, MLP, ROTARY = "quartz::rms_norm", "quartz::gated_activation", "quartz::rotary_qk"
ROUTER = "quartz::moe_topk"
FAMILIES = {
    "llama": (NORM, MLP, ROTARY),
    "qwen3": (NORM, MLP, ROTARY),
    "qwen3_moe": (NORM, ROTARY, ROUTER),
    "qwen3_next": (NORM, MLP, ROTARY, ROUTER),
    "gemma2": (NORM, MLP, ROTARY),
    "gemma3": (NORM, MLP, ROTARY),
    "gpt_oss": (NORM, ROTARY, ROUTER),
    "mixtral": (NORM, ROTARY, ROUTER),
    "deepseek_v3": (NORM, MLP, ROTARY, ROUTER),
    "deepseek_v4": (NORM,),
    "glm4_moe": (NORM, MLP, ROTARY, ROUTER),
    "muse_glimmer": (NORM, MLP, ROTARY),
    "mamba": (NORM,),
}


@contextlib.contextmanager
def unfused():
    """Transformers' own modules."""
    patches.undo("transformers_fused")
    try:
        yield
    finally:
        patches.install_all()


def forward(name, dtype):
    """Return the model on quartz and its inputs."""
    model = model_zoo.build(name).to(dtype).eval().to("quartz")
    inputs = {key: value.to("quartz") for key, value in model_zoo.case(name).inputs().items() if key != "labels"}
    return model, {key: value.to(dtype) if value.is_floating_point() else value for key, value in inputs.items()}


@pytest.mark.parametrize("name", [name for name in FAMILIES if name in model_zoo.available()])
def test_models_call_them_and_give_the_same_numbers(name):
    model, inputs = forward(name, torch.float32)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        model(**inputs)  # the first call tries the forms out
        torch.quartz.reset_op_counts()
        fused = model(**inputs).logits
        counts = torch.quartz.op_counts()
        with unfused():
            expected = model(**inputs).logits
    for operator in FAMILIES[name]:
        assert counts[operator].own > 0, operator
    torch.testing.assert_close(fused, expected, rtol=1e-4, atol=1e-5)
    assert all(same_bits(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", [name for name in FAMILIES if name in model_zoo.available()])
def test_each_module_stays_within_one_ulp_in_bfloat16(name):
    model, inputs = forward(name, torch.bfloat16)
    seen = []

    def record(module, arguments, output):
        seen.append((module, arguments, output))

    originals = {}
    for module in model.modules():
        kind = type(module)
        named = kind.__module__.startswith("transformers.") and ("Norm" in kind.__name__ or "MLP" in kind.__name__)
        if named and hasattr(kind.forward, "__wrapped__"):
            module.register_forward_hook(record)
            originals[kind] = kind.forward.__wrapped__
    with torch.no_grad():
        model(**inputs)
        assert seen
        for module, arguments, output in seen:
            if isinstance(output, tuple):  # a block of experts: its own tests
                continue
            expected = originals[type(module)](module, *arguments)
            if "MLP" in type(module).__name__ and not isinstance(getattr(module, "gate_proj", None), torch.nn.Linear):
                continue
            # One ulp is 2^-7 of a number's magnitude at most; the product behind an MLP spreads it over the row.
            scale = expected.abs().amax(-1, keepdim=True).float() if "MLP" in type(module).__name__ else expected.abs()
            assert ((output.float() - expected.float()).abs() <= 2.0**-7 * scale + 1e-6).all(), type(module)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss", "deepseek_v3", "glm4_moe", "qwen3_next"])
def test_gradients(name):
    model, inputs = forward(name, torch.float32)

    def gradients():
        model.zero_grad()
        model(**inputs).logits.square().mean().backward()
        return {key: value.grad.clone() for key, value in model.named_parameters() if value.grad is not None}

    fused = gradients()
    with unfused():
        expected = gradients()
    assert fused.keys() == expected.keys()
    for key, value in fused.items():
        scale = expected[key].abs().max().item()
        torch.testing.assert_close(value, expected[key], rtol=1e-3, atol=1e-4 * scale + 1e-7, msg=key)


def test_bits_do_not_depend_on_gradients():
    model, inputs = forward("llama", torch.bfloat16)
    with torch.no_grad():
        without = model(**inputs).logits
    assert same_bits(model(**inputs).logits, without)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_functions_keep_their_bits(dtype):
    for name in ("llama", "gpt_oss", "deepseek_v3", "glm4_moe", "cohere", "glm"):
        module = __import__(f"transformers.models.{name}.modeling_{name}", fromlist=["x"])
        transformers_fused._scan(module.__name__)
        function = getattr(module, "apply_rotary_pos_emb_interleave", module.apply_rotary_pos_emb)
        size, width = (16, 8) if name in ("gpt_oss", "glm4_moe", "glm") else (16, 16)
        q, k = torch.randn(2, 4, 5, size).to(dtype), torch.randn(2, 2, 5, size).to(dtype)
        angles = torch.randn(2, 5, width // 2)
        angles = angles.repeat_interleave(2, -1) if name == "cohere" else torch.cat((angles, angles), -1)
        tables = [angles.cos().to(dtype), angles.sin().to(dtype)]
        expected = function(q, k, *tables)
        torch.quartz.reset_op_counts()
        got = function(*(t.to("quartz") for t in (q, k, *tables)))
        assert torch.quartz.op_counts()["quartz::rotary_qk"].own == 1, name
        for a, b in zip(got, expected, strict=True):
            assert a.dtype == b.dtype and same_bits(a, b), name
        exchanged = function(q.transpose(1, 2), k.transpose(1, 2), *tables, unsqueeze_dim=2)
        got = function(*(t.to("quartz") for t in (q.transpose(1, 2), k.transpose(1, 2), *tables)), unsqueeze_dim=2)
        assert all(same_bits(a, b) for a, b in zip(got, exchanged, strict=True)), name


def test_other_devices_run_their_own_code(monkeypatch):
    def refuse():
        raise AssertionError("an operator of quartz was called")

    model = model_zoo.build("llama").eval()
    inputs = {key: value for key, value in model_zoo.case("llama").inputs().items() if key != "labels"}
    with torch.no_grad():
        with unfused():
            expected = model(**inputs).logits
        monkeypatch.setattr(transformers_fused, "_ops", refuse)
        assert same_bits(model(**inputs).logits, expected)


def test_disable_restores_everything_and_install_brings_it_back():
    model, inputs = forward("llama", torch.float32)
    module = sys.modules[type(model).__module__]
    replaced = (module.LlamaRMSNorm.forward, module.LlamaMLP.forward, module.apply_rotary_pos_emb)
    with torch.no_grad():
        fused = model(**inputs).logits
        transformers.disable()
        try:
            assert not [name for name in patches.installed() if name.startswith("transformers")]
            now = (module.LlamaRMSNorm.forward, module.LlamaMLP.forward, module.apply_rotary_pos_emb)
            assert now == tuple(function.__wrapped__ for function in replaced)
            torch.quartz.reset_op_counts()
            expected = model(**inputs).logits
            assert not {NORM, MLP, ROTARY} & set(torch.quartz.op_counts())
        finally:
            patches.install_all()
        assert module.LlamaRMSNorm.forward is not now[0]
        assert same_bits(model(**inputs).logits, fused)
    torch.testing.assert_close(fused, expected)


def test_what_computes_something_else_stays():
    from transformers.models.llama import modeling_llama as llama

    transformers_fused._scan(llama.__name__)

    class ScaledRMSNorm(llama.LlamaRMSNorm):
        def forward(self, hidden_states):
            return 2 * super().forward(hidden_states)

    class ClippedMLP(llama.LlamaMLP):
        def forward(self, x):
            return self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=1.0) * self.up_proj(x))

    config = model_zoo.build("llama").config
    x = torch.randn(3, config.hidden_size)
    norm, mlp = ScaledRMSNorm(config.hidden_size), ClippedMLP(config)
    for module in (norm, mlp):
        kind = type(module)
        make = transformers_fused._make_norm if module is norm else transformers_fused._make_mlp
        replacement = make(kind.__dict__["forward"])
        expected = module(x)
        moved = copy.deepcopy(module).to("quartz")
        got = replacement(moved, x.to("quartz"))
        torch.testing.assert_close(got.cpu(), expected)
        assert replacement.forms.values() == [None]


def test_dtypes_that_would_promote_stay():
    from transformers.models.llama import modeling_llama as llama

    norm = llama.LlamaRMSNorm(32).to("quartz")
    x = torch.randn(3, 32, device="quartz", dtype=torch.bfloat16)
    assert norm(x).dtype == torch.float32  # weight * x.to(bfloat16) promotes


def test_compiled_models_give_the_same_numbers():
    model, inputs = forward("llama", torch.float32)
    with torch.no_grad():
        expected = model(**inputs).logits
        got = torch.compile(model, backend="aot_eager")(**inputs).logits
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_first_use_leaves_the_generator_of_the_cpu_alone(run_python):
    run_python(
        f"""
        import sys

        sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})
        import torch, torch_quartz
        import transformers_jobs as jobs
        from model_zoo import build

        model = build("llama").to("quartz")
        state = torch.get_rng_state()
        model(**jobs.prompt("quartz"))
        assert torch.equal(torch.get_rng_state(), state)
        """
    )
