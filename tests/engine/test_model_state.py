"""What a program does to a model around an engine: training mode, buffers, weights."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch_quartz as tq
from model_zoo import build

PARAMS = tq.SamplingParams(temperature=0.0, max_tokens=8, logprobs=0, ignore_eos=True)


def answer(llm):
    sample = llm.generate([[3, 4, 5, 6]], PARAMS, use_tqdm=False)[0].outputs[0]
    return sample.token_ids, sample.cumulative_logprob


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_a_model_in_training_mode_is_served_without_dropout(enforce_eager):
    model = build("gpt2", resid_pdrop=0.4, embd_pdrop=0.4, attn_pdrop=0.4).to("quartz").eval()
    llm = tq.LLM(model, max_model_len=32, kv_cache_bytes=2**20, enforce_eager=enforce_eager)
    expected = answer(llm)
    model.train()
    model.transformer.h[0].eval()  # a part that a program keeps in evaluation mode stays there
    assert [answer(llm) for _ in range(3)] == [expected] * 3
    assert model.training and model.transformer.h[1].training and not model.transformer.h[0].training


def test_a_buffer_that_is_replaced_is_seen():
    model = build("llama").to("quartz").eval()
    llm = tq.LLM(model, max_model_len=32, kv_cache_bytes=2**20)
    before = answer(llm)
    rotary = model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq * 0.5
    llm.reset_prefix_cache()
    eager = tq.LLM(model, max_model_len=32, kv_cache_bytes=2**20, enforce_eager=True)
    assert answer(llm) == answer(eager) != before
    assert isinstance(before[1], float) and torch.isfinite(torch.tensor(before[1]))


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_next", "mamba"])
def test_two_engines_in_threads_serve_one_model(name):
    model = build(name).to("quartz", torch.bfloat16).eval()
    prompts = [[3 + i, 4, 5, 6 + 2 * i] for i in range(4)]
    params = tq.SamplingParams(temperature=1.0, seed=5, max_tokens=6, logprobs=0, ignore_eos=True)
    ids = torch.tensor([prompts[0]], device="quartz")
    with torch.no_grad():
        plain = model(ids, use_cache=False).logits

    def engine():
        return tq.LLM(model, max_model_len=32, kv_cache_bytes=2**20)

    def serve(llm):
        outputs = [llm.generate(prompts, params, use_tqdm=False) for _ in range(3)]
        return [(s.token_ids, s.cumulative_logprob) for some in outputs for o in some for s in o.outputs]

    expected = serve(engine())
    engines = [engine(), engine()]
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(serve, engines)) == [expected] * 2
    with torch.no_grad():
        assert torch.equal(model(ids, use_cache=False).logits, plain)
    assert serve(engine()) == expected
