"""The model runner: whatever a step mixes, tokens and log probabilities are those of the plain model."""

import math

import numpy as np
import pytest
import torch
from driver import Driver, rescored
from model_zoo import VOCABULARY, build
from torch.utils._python_dispatch import TorchDispatchMode
from torch_quartz.engine.config import EngineConfig
from torch_quartz.engine.graphs import DecodeGraphs
from torch_quartz.engine.model_runner import ModelRunner
from torch_quartz.engine.sampling_params import SamplingParams

FAMILIES = ("llama", "gpt2", "gemma2", "gemma3", "gpt_oss", "qwen3_moe", "deepseek_v3", "qwen3_next", "mamba")
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


def prompts(count=6):
    generator = torch.Generator().manual_seed(count)
    return [torch.randint(3, VOCABULARY, (1 + 5 * i,), generator=generator).tolist() for i in range(count)]


def params(number, **changes):
    return SamplingParams(
        **{
            "temperature": (0.0, 0.4, 0.8, 1.1)[number % 4],
            "seed": 70 + number,
            "max_tokens": 9,
            "logprobs": 2,
            **changes,
        }
    )


def served(model, *, overlap=True, before=None, **options):
    driver = Driver(model, **options)
    if before is not None:
        before(driver)
    for number, prompt in enumerate(prompts()):
        driver.add(prompt, params(number, n=2 if number == 3 else 1))
    driver.run(overlap)
    return driver


@pytest.fixture(scope="module")
def llama():
    return build("llama").to("quartz", torch.bfloat16).eval()


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    model = build(request.param).to("quartz", torch.bfloat16).eval()
    return model, served(model, overlap=False, max_num_seqs=1 + 1, enable_prefix_caching=False).found


VARIATIONS = {
    "all": {},
    "chunks of 4": {"max_num_batched_tokens": 24, "max_prefill_tokens_per_request": 4},
    "drafts": {"speculative": NGRAM},
    "drafts, chunks, no overlap": {"speculative": NGRAM, "max_num_batched_tokens": 17, "overlap": False},
}


@pytest.mark.parametrize("name", VARIATIONS)
def test_same_bytes(family, name):
    model, expected = family
    options = dict(VARIATIONS[name])
    assert served(model, overlap=options.pop("overlap", True), **options).found == expected


def test_scores_are_those_of_the_plain_model(family):
    model, found = family
    for number, prompt in enumerate(prompts()):
        entry = found[number, 0]
        assert entry["raw"] == rescored(model, prompt, entry["tokens"])


@pytest.mark.parametrize("value", [math.nan, 1e30, 0.0])
def test_unused_places_of_the_pool(family, value):
    model, expected = family

    def fill(driver):
        driver.runner.cache.fill(value)

    assert served(model, before=fill).found == expected
    assert served(model, before=fill, speculative=NGRAM).found == expected


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preemption(family, preemption):
    model, expected = family
    swap = {"swap_bytes": 2**24} if preemption == "swap" else {}
    driver = Driver(model, num_blocks=9, preemption=preemption, enable_prefix_caching=False, **swap)
    for number, prompt in enumerate(prompts()):
        driver.add(prompt, params(number, n=2 if number == 3 else 1))
    assert driver.run() == expected
    stats = driver.scheduler.stats()
    paged = any(group.kind != "state" for group in driver.runner.cache.groups)
    assert not paged or stats["preemptions"] > 0
    assert not paged or preemption == "recompute" or stats["swaps_in"] > 0


def test_the_model_stays_what_it_was(llama):
    def implementations():
        return [m.config._attn_implementation for m in llama.modules() if hasattr(m, "config")]

    before = implementations()
    served(llama)
    assert implementations() == before
    assert not any("forward" in module.__dict__ for module in llama.modules())


def test_weights_may_change_in_place():
    model = build("llama").to("quartz", torch.float32).eval()
    driver = Driver(model, enable_prefix_caching=False)
    first = driver.add(prompts()[2])
    driver.run()
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)
    second = driver.add(prompts()[2])
    found = driver.run()
    assert found[first, 0]["tokens"] != found[second, 0]["tokens"]
    assert found[second, 0]["raw"] == rescored(model, prompts()[2], found[second, 0]["tokens"])
    # Other tensors in place of the parameters: graphs that were captured with the old ones are given up.
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5
    third = driver.add(prompts()[2])
    found = driver.run()
    assert found[third, 0]["raw"] == rescored(model, prompts()[2], found[third, 0]["tokens"])


# ---- the last layer


def test_last_layer_leaves_rows_out(llama):
    driver = served(llama, enable_prefix_caching=False)
    rows, saved = driver.runner.run_rows, driver.runner.saved_rows
    # Of every prompt all rows but the last are left out.
    assert saved >= sum(len(prompt) - 1 for prompt in prompts()) * 0.9
    assert saved < rows
    whole = Driver(llama, enable_prefix_caching=False)
    whole.runner._all_rows = True
    for number, prompt in enumerate(prompts()):
        whole.add(prompt, params(number, n=2 if number == 3 else 1))
    assert whole.run() == driver.found
    assert whole.runner.saved_rows <= driver.runner.saved_rows


# ---- prompt log probabilities


@pytest.mark.parametrize("chunk", [3, 64])
def test_prompt_logprobs(llama, chunk):
    from torch_quartz.ops import token_logprobs

    prompt = prompts()[5]
    driver = Driver(llama, max_num_batched_tokens=64, max_prefill_tokens_per_request=chunk)
    for _ in range(2):  # also with a warm prefix cache
        key = driver.add(prompt, params(0, prompt_logprobs=3))
        driver.run()
        pieces = driver.prompt_logprobs[key]
        ids = torch.tensor([prompt], device="quartz")
        with torch.no_grad():
            logits = llama(ids, use_cache=False).logits[0, :-1]
        expected = token_logprobs(logits, ids[0, 1:]).cpu().numpy()
        assert [first for first, *_ in pieces] == list(range(0, len(prompt) - 1, chunk))
        assert np.concatenate([raw for _, raw, *_ in pieces]).tobytes() == expected.tobytes()
        top = np.concatenate([values for *_, values in pieces])
        assert top.shape == (len(prompt) - 1, 3)
        assert (np.sort(-top, 1) == -top).all()


# ---- host and device


class _NoSync(TorchDispatchMode):
    """Fails where the host would look at what the device computes."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "item", "unique", "masked_select")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket.__name__ not in self.FORBIDDEN, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek_v3", "qwen3_next"])
def test_no_step_waits_for_the_device(name):
    model = build(name).to("quartz", torch.bfloat16).eval()
    served(model)  # what is found out once about a model is known
    driver = Driver(model, speculative=NGRAM)
    for number, prompt in enumerate(prompts()):
        changes = {"frequency_penalty": 0.3, "logit_bias": {5: 1.0}} if number == 2 else {}
        driver.add(prompt, params(number, **changes))
    driver.runner.head(torch.zeros(1, 32, dtype=torch.bfloat16, device="quartz"), None)
    driver.run(guard=_NoSync())


def test_static_inputs_of_graphs(family):
    """The buckets that graphs are captured from give the same bits, run eagerly."""
    model, expected = family

    def use(driver):
        driver.runner._graphs = DecodeGraphs(driver.runner, capture=False)

    assert served(model, before=use).found == expected
    assert served(model, before=use, speculative=NGRAM).found == expected


# ---- sizes and refusals


def test_memory_report(llama):
    driver = Driver(llama, num_blocks=10)
    report = driver.runner.memory_report()
    assert report["weights"] == sum(p.numel() * 2 for p in llama.parameters())
    # 2 layers, 8 tokens, 2 heads of 8, bfloat16, keys and values
    assert report["kv_cache"] == 10 * 2 * 8 * 2 * 8 * 2 * 2
    assert report["groups"][0]["num_blocks"] == 10


def test_blocks_fit_the_bytes(llama):
    driver = Driver(llama, kv_cache_bytes=100_000)
    assert driver.runner.cache.bytes <= 100_000
    with pytest.raises(ValueError, match="at least one block of 8 tokens"):
        Driver(llama, kv_cache_bytes=100)


def test_a_model_with_other_attention_is_refused(llama):
    """The proof notices what the attention interface does not show."""
    model = build("llama").to("quartz", torch.bfloat16).eval()
    layer = model.model.layers[0]
    layer.register_forward_hook(lambda module, inputs, output: output + output.mean(1, keepdim=True))
    with pytest.raises(NotImplementedError, match="are not those of the plain model"):
        Driver(model)
    Driver(model, validate_model=False)


def test_length_of_the_model(llama):
    with pytest.raises(ValueError, match="at most the model's 128 positions, got 129"):
        ModelRunner(llama, EngineConfig(llama, max_model_len=129))
    config = EngineConfig(llama)
    ModelRunner(llama, config)
    assert config.max_model_len == 128


def test_compressed_attention_is_refused():
    with pytest.raises(NotImplementedError, match="layer 0 is of the type 'heavily_compressed_attention'"):
        Driver(build("deepseek_v4").to("quartz", torch.bfloat16).eval())


@pytest.mark.parametrize(
    "options, message",
    [
        ({"block_size": 0}, "block_size must be an integer of at least 1, got 0"),
        ({"memory_fraction": 1.5}, "memory_fraction must be above 0, up to 1, got 1.5"),
        ({"device": "cpu"}, "device must be a quartz device, got 'cpu'"),
        ({"dtype": "float31"}, "dtype must be 'auto' or the name of a dtype"),
        ({"swap_bytes": 5}, "swap_bytes must be left out unless preemption is 'swap'"),
        ({"policy": "random"}, "policy must be one of"),
        ({"speculative": {"method": "oracle"}}, "method must be one of"),
        ({"speculative": {"method": "ngram", "tokens": 3}}, "speculative"),
        ({"speculative": {"method": "ngram", "num_speculative_tokens": 0}}, "num_speculative_tokens must be 1 to 32"),
        ({"speculative": {"method": "ngram", "step_times": [1.0]}}, "left out unless adaptive is True"),
        ({"speculative": {"method": "draft_model"}}, "model must be given for method 'draft_model'"),
        ({"speculative": NGRAM, "max_num_batched_tokens": 3}, "at least the 4 rows of a sequence"),
    ],
)
def test_configuration_is_checked(options, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**options)
