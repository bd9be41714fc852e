"""Drafters that run modules: a draft model, a multi-token head, block drafters.

What they propose is compared with a plain loop: the same modules without any cache over the whole sequence, for every
proposal of a run with chunks, forks, preemption and a warm prefix cache. What comes out is that of plain decoding.
"""

import random
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from model_zoo import VOCABULARY, build
from torch_quartz import LLM, SamplingParams
from torch_quartz.engine.drafters import Proposal, dspark_model
from torch_quartz.engine.drafters.ngram import NgramDrafter
from torch_quartz.ops import sample

LIMIT = 96
MASK = VOCABULARY - 1
DRAFTS = 4
MTP = ("deepseek_v3", "glm4_moe", "qwen3_next")
OPTIONS = {
    "plain": {},
    "chunks": {"max_num_batched_tokens": 40, "max_prefill_tokens_per_request": 7},
    "few blocks": {"num_blocks": 26},
    "few blocks, swapped": {"num_blocks": 26, "preemption": "swap", "swap_bytes": 2**22},
    "no overlap": {"overlap": False, "block_size": 16},
}


def tiny(name, seed, **changes):
    """A tiny random model on the device, in bfloat16."""
    model = build(name, max_position_embeddings=LIMIT, **changes)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():  # `build` has one seed; normed weights stay as they are
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
    return model.to("quartz", torch.bfloat16).eval()


def network_config(config_class, **fields):
    return config_class(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        mask_token_id=MASK,
        **fields,
    )


def deepspec_config(kind="vanilla", rank=8, confidence=True, **fields):
    from transformers import Qwen3Config

    given = {
        "architectures": ["Qwen3DSparkModel"],
        "vocab_size": VOCABULARY,
        "layer_types": ["full_attention"] * 2,
        "target_layer_ids": [-1, 0, 2],
        "block_size": 7,
        "markov_rank": rank,
        "markov_head_type": kind,
        "enable_confidence_head": confidence,
        "confidence_head_with_markov": rank > 0,
        **fields,
    }
    return network_config(Qwen3Config, **given)


def scattered(model, seed=11):
    """Give a drafter weights that show: of equal size everywhere, norms too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            scale, base = (0.1, 1.0) if "norm" in name else (0.3, 0.0)
            parameter.copy_(base + torch.randn(parameter.shape, generator=generator) * scale)
    return model


def dspark(kind="vanilla", rank=8, confidence=True):
    return scattered(dspark_model.from_config(deepspec_config(kind, rank, confidence)))


def muse_network():
    from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

    config = network_config(
        MuseGlimmerAssistantConfig,
        block_size=12,
        target_layer_ids=[1, 3],  # 3 is the last layer: behind the norm
        sliding_window=14,
        layer_types=["sliding_attention", "full_attention"],
    )
    return scattered(MuseGlimmerAssistantModel(config))


def mtp_target(name, seed=3):
    model = tiny(name, seed)
    if name == "qwen3_next":  # whose configuration does not know of its head
        model.config.num_mtp_layers, model.config.mtp_layer_types = 1, ["full_attention"]
    return model


def mtp_head(target, seed=12):
    from transformers.modeling_layers import MtpModel

    head = MtpModel(target, 1)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in head.layers.named_parameters():
            scale, base = (0.1, 1.0) if "norm" in name else (0.2, 0.0)
            parameter.copy_(base + torch.randn(parameter.shape, generator=generator) * scale)
    return head


@pytest.fixture(scope="module")
def target():
    return tiny("llama", 3, num_hidden_layers=4)


@pytest.fixture(scope="module")
def requests():
    chance = random.Random(5)
    shared = [chance.randrange(3, MASK) for _ in range(20)]
    prompts, parameters = [], []
    for number in range(10):
        ids = [chance.randrange(3, MASK) for _ in range(chance.randint(1, 30))]
        prompts.append({"prompt_token_ids": shared + ids if number % 3 == 0 else ids})
        kinds = (
            {"temperature": 0.0},
            {"temperature": 1.0, "n": 2},
            {"temperature": 0.7, "top_k": 20},
            {"temperature": 1.3, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
            {"temperature": 0.9, "top_p": 0.9, "min_p": 0.01},
        )
        kind = kinds[number % len(kinds)]
        parameters.append(SamplingParams(max_tokens=8 + 3 * (number % 4), seed=number, logprobs=1, **kind))
    return prompts, parameters


def engine(target, method=None, model=None, drafts=DRAFTS, **options):
    speculative = None if method is None else {"method": method, "model": model, "num_speculative_tokens": drafts}
    given = {"max_model_len": LIMIT, "block_size": 8, "num_blocks": 96, "max_num_seqs": 8, **options}
    return LLM(target, **given, speculative=speculative)


def serve(llm, requests):
    """Tokens and bits of log probabilities of all samples."""
    outputs = llm.generate(*requests, use_tqdm=False)
    llm.check()
    return [
        (s.token_ids, np.array([e[t].logprob for t, e in zip(s.token_ids, s.logprobs, strict=True)]).tobytes())
        for output in outputs
        for s in output.outputs
    ]


def drafter_of(llm):
    return llm.llm_engine.runner.drafter


def record(llm):
    """Note every proposal: the tokens before it, the drafts and the confidences."""
    drafter, notes = drafter_of(llm), []
    original = drafter.propose

    def propose(context):
        proposal = original(context)
        lengths = context.lengths.tolist()
        rows = context.tokens.index_select(0, context.slots).tolist()
        drafts = proposal.drafts.tolist()
        available = proposal.available.tolist()
        sure = None if proposal.confidences is None else proposal.confidences.tolist()
        for i in np.flatnonzero(context.drawn).tolist():
            confidences = None if sure is None else sure[i]
            notes.append((rows[i][: lengths[i]], drafts[i][: available[i]], confidences))
        return proposal

    drafter.propose = propose
    return notes


def running(notes, requests, outputs, drafts=DRAFTS):
    """Those notes whose sequences went on: others may have lost their blocks. With parameters and sample number."""
    found = []
    samples = iter(outputs)
    for prompt, parameters in zip(*requests, strict=True):
        for index in range(parameters.n):
            ids = [*prompt["prompt_token_ids"], *next(samples)[0]]
            for before, proposed, confidences in notes:
                begun = len(prompt["prompt_token_ids"]) < len(before) < len(ids)
                if begun and ids[: len(before)] == before and len(before) + 12 <= LIMIT:
                    found.append((before, proposed, confidences, parameters, index))
    assert len(found) > 40
    assert all(len(proposed) == drafts for _, proposed, *_ in found)
    return found


def draw(logits, before, parameters, index, offset):
    """The target's draw of a position, for parameters without penalties."""
    return int(
        sample(
            logits.unsqueeze(0),
            parameters.temperature,
            parameters.top_k or None,
            parameters.top_p if parameters.top_p < 1 else None,
            parameters.min_p or None,
            parameters.seed,
            torch.tensor([len(before) + offset], device="quartz"),
            sample_indices=index,
        ).tokens
    )


def on_device(ids):
    return torch.tensor([ids], device="quartz")


@torch.no_grad()
def loop_model(model, before, parameters, index):
    ids, drafts = list(before), []
    for offset in range(DRAFTS):
        drafts.append(draw(model(on_device(ids), use_cache=False).logits[0, -1], before, parameters, index, offset))
        ids.append(drafts[-1])
    return drafts, None


@torch.no_grad()
def loop_mtp(target, head, before, parameters, index):
    hidden = target.base_model(on_device(before[:-1]), use_cache=False).last_hidden_state
    ids, drafts = before[1:], []
    for offset in range(DRAFTS):
        positions = torch.arange(1, len(ids) + 1, device="quartz").unsqueeze(0)
        output = head.forward_layer(0, hidden, positions, None, input_ids=on_device(ids))[:, -1:]
        drafts.append(draw(target.lm_head(output)[0, -1], before, parameters, index, offset))
        ids, hidden = [*ids, drafts[-1]], torch.cat((hidden, output), 1)
    return drafts, None


@torch.no_grad()
def loop_dspark(target, model, before, parameters, index):
    network, size, known = model.network, model.block_size, len(before) - 1
    states = target(on_device(before[:-1]), use_cache=False, output_hidden_states=True).hidden_states
    context = torch.cat([states[layer + 1] for layer in model.target_layer_ids], -1)
    block = target.get_input_embeddings()(on_device([before[-1]] + [MASK] * (size - 1)))
    row, key = torch.arange(known, known + size)[:, None], torch.arange(known + size)[None]
    near = ((row - key).abs() <= network.config.sliding_window) if network.config.sliding_window else row >= 0
    masks = {"full_attention": None, "sliding_attention": near.expand(size, known + size)[None, None].to("quartz")}
    hidden = network(
        noise_embeds=block,
        context_hidden_states=context,
        attention_mask=masks,
        position_ids=torch.arange(known + size, device="quartz").unsqueeze(0),
        use_cache=False,
    ).last_hidden_state[0, model.first_row :]
    previous, drafts, confidences, state = before[-1], [], [], None
    for offset in range(DRAFTS):
        logits = target.lm_head(hidden[offset]).float()
        token = torch.tensor([previous], device="quartz")
        if model.markov_head is not None:
            bias, state = model.markov_head(token, hidden[offset : offset + 1], state)
            logits = logits + bias[0].float()
        if model.confidence_head is not None:
            features = hidden[offset]
            if model.markov_head is not None:
                features = torch.cat((features, model.markov_head.markov_w1(token)[0]))
            confidences.append(float(torch.sigmoid(model.confidence_head(features).float())))
        previous = draw(logits, before, parameters, index, offset)
        drafts.append(previous)
    return drafts, confidences or None


def check_against_loop(llm, requests, loop, rounds=1):
    """Compare all proposals of a run with a plain loop; returns how many were compared."""
    notes, seen = record(llm), 0
    for _ in range(rounds):
        notes.clear()
        outputs = serve(llm, requests)
        for before, proposed, confidences, parameters, index in running(notes, requests, outputs):
            if parameters.repetition_penalty != 1.0:
                continue
            expected, sure = loop(before, parameters, index)
            assert proposed == expected, (len(before), proposed, expected)
            assert (confidences is None) == (sure is None)
            if sure is not None:
                assert all(0.0 <= c <= 1.0 for c in confidences)
                assert confidences == pytest.approx(sure, abs=1e-6)
            seen += 1
    return seen


@pytest.fixture(scope="module")
def plain(target, requests):
    return serve(engine(target), requests)


@pytest.mark.parametrize("options", OPTIONS)
def test_a_draft_model_proposes_what_it_draws_without_a_cache(target, requests, options):
    model = tiny("qwen3", 8, num_hidden_layers=1)
    llm = engine(target, "draft_model", model, **OPTIONS[options])
    assert check_against_loop(llm, requests, lambda *case: loop_model(model, *case), rounds=2) > 40
    if "few" in options:
        assert llm.metrics()["preemptions"] > 0


@pytest.mark.parametrize("options", ["plain", "chunks", "few blocks"])
def test_a_draft_model_with_windows(target, requests, options):
    model = tiny("gemma3", 8)
    llm = engine(target, "draft_model", model, **OPTIONS[options])
    assert check_against_loop(llm, requests, lambda *case: loop_model(model, *case)) > 40


@pytest.mark.parametrize("options", OPTIONS)
def test_a_block_drafter_proposes_what_it_draws_without_a_cache(target, requests, options):
    model = dspark()
    llm = engine(target, "dspark", model, **OPTIONS[options])
    assert check_against_loop(llm, requests, lambda *case: loop_dspark(target, model, *case), rounds=2) > 40


@pytest.mark.parametrize("kind", ["gated", "rnn", "dflash", "no confidence"])
def test_other_heads_of_block_drafters(target, requests, kind):
    rank, confidence = (0 if kind == "dflash" else 8), kind != "no confidence"
    model = dspark(kind if kind in ("gated", "rnn") else "vanilla", rank, confidence)
    llm = engine(target, "dspark", model, **OPTIONS["chunks"])
    assert check_against_loop(llm, requests, lambda *case: loop_dspark(target, model, *case)) > 40


@pytest.mark.parametrize("options", ["plain", "chunks", "few blocks"])
def test_the_assistant_of_transformers(target, requests, options):
    network = muse_network()
    model = dspark_model.DSparkModel(network, first_row=1)
    llm = engine(target, "dspark", network, **OPTIONS[options])
    assert check_against_loop(llm, requests, lambda *case: loop_dspark(target, model, *case)) > 40


@pytest.mark.parametrize("options", ["plain", "chunks", "few blocks"])
@pytest.mark.parametrize("name", MTP)
def test_a_multi_token_head_proposes_what_it_draws_without_a_cache(requests, name, options):
    model = mtp_target(name)
    head = mtp_head(model)
    # Where a cached prefix ends, the head's last key there is of the token that came first.
    llm = engine(model, "mtp", head, enable_prefix_caching=False, **OPTIONS[options])
    assert check_against_loop(llm, requests, lambda *case: loop_mtp(model, head, *case)) > 40


@pytest.mark.parametrize("name", MTP)
def test_outputs_with_a_multi_token_head(requests, name):
    model = mtp_target(name)
    expected = serve(engine(model), requests)
    for depth, options in ((1, {}), (DRAFTS, OPTIONS["chunks"]), (7, OPTIONS["few blocks"])):
        llm = engine(model, "mtp", mtp_head(model), drafts=depth, **options)
        assert serve(llm, requests) == expected
        assert serve(llm, requests) == expected  # warm


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("method", ["draft_model", "dspark"])
def test_outputs_are_those_of_plain_decoding(target, requests, plain, method, options):
    model = tiny("qwen3", 8, num_hidden_layers=1) if method == "draft_model" else dspark()
    for depth in (1, 7):
        llm = engine(target, method, model, drafts=depth, **OPTIONS[options])
        assert serve(llm, requests) == plain
        assert serve(llm, requests) == plain
    assert llm.metrics()["accepted_tokens"] > 0


@pytest.mark.parametrize("seed", range(3))
def test_outputs_do_not_depend_on_what_is_proposed(target, requests, plain, monkeypatch, seed):
    """Any tokens, any number of them, gaps in between, confidences of any size."""
    generator = torch.Generator().manual_seed(seed)

    def propose(self, context):
        shape = (context.num_seqs, self.max_drafts)
        drafts = torch.randint(-1, VOCABULARY, shape, generator=generator)
        available = torch.randint(0, self.max_drafts + 1, shape[:1], generator=generator)
        drafts[torch.arange(self.max_drafts) >= available.unsqueeze(1)] = -1
        confidences = torch.rand(shape, generator=generator)
        return Proposal(drafts.to("quartz"), available.to("quartz"), confidences.to("quartz"))

    monkeypatch.setattr(NgramDrafter, "propose", propose)
    for options in (OPTIONS["plain"], OPTIONS["few blocks"]):
        llm = engine(target, "ngram", drafts=6, **options)
        assert serve(llm, requests) == plain
        assert serve(llm, requests) == plain


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("same", [True, False])
def test_an_identical_draft_model_is_always_right(target, options, same):
    """It draws with the noise of the target: acceptance is 100 % at temperature 1, through the prefix cache too."""
    chance = random.Random(9)
    prompts = [{"prompt_token_ids": [chance.randrange(3, MASK) for _ in range(1 + 5 * i)]} for i in range(8)]
    kinds = ({}, {"n": 3}, {"top_p": 0.8}, {"presence_penalty": 0.5, "repetition_penalty": 1.3})
    # No end by length within a proposal, where the rest of it is not looked at.
    parameters = [
        SamplingParams(max_tokens=1 + 4 * (DRAFTS + 1), temperature=1.0, seed=i, logprobs=0, **kinds[i % 4])
        for i in range(len(prompts))
    ]
    model = target if same else tiny("llama", 3, num_hidden_layers=4)
    llm = engine(target, "draft_model", model, **OPTIONS[options])
    for _ in range(2):
        serve(llm, (prompts, parameters))
    metrics = llm.metrics()
    assert metrics["accepted_tokens"] > 300
    assert metrics["acceptance_rate"] == 1.0
    assert (llm.memory_report()["drafter"] == 0) == same


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "gpt_oss"])
def test_an_identical_draft_model_with_windows(name):
    model = tiny(name, 4)
    llm = engine(model, "draft_model", model)
    prompts = [{"prompt_token_ids": list(range(3, 20 + i))} for i in range(4)]
    parameters = [SamplingParams(max_tokens=1 + 3 * (DRAFTS + 1), temperature=1.0, seed=i) for i in range(4)]
    llm.generate(prompts, parameters, use_tqdm=False)
    assert llm.metrics()["acceptance_rate"] == 1.0


@pytest.mark.parametrize("method", ["draft_model", "mtp", "dspark"])
def test_no_two_rows_write_the_same_place(requests, monkeypatch, method):
    """On a GPU any of them may stay; on the host, the last."""
    from torch_quartz import ops

    model = mtp_target("glm4_moe") if method == "mtp" else tiny("llama", 3, num_hidden_layers=4)
    drafter = {"draft_model": lambda: model, "mtp": lambda: mtp_head(model), "dspark": dspark}[method]()
    llm = engine(model, method, drafter, **OPTIONS["chunks"])
    original, seen = ops.write_kv, []

    def write_kv(key, value, key_cache, value_cache, slots):
        written = slots[slots >= 0].tolist()
        seen.append((len(written), len(set(written))))  # the engine would take an error here for a request's
        return original(key, value, key_cache, value_cache, slots)

    monkeypatch.setattr(ops, "write_kv", write_kv)
    serve(llm, requests)
    assert all(rows == places for rows, places in seen)
    assert max(seen)[0] > 30


def test_both_ways_to_draw_from_a_markov_head_agree(target, requests, monkeypatch):
    """`markov_draft`, and the target's draw one after the other, which knows penalties."""
    from torch_quartz.engine.sampler import Sampler

    some = tuple([part[i] for i in range(len(part)) if i % 5 != 3] for part in requests)
    notes = []
    for _ in range(2):
        llm = engine(target, "dspark", dspark())
        notes.append(record(llm))
        serve(llm, some)
        monkeypatch.setattr(Sampler, "plain_parameters", lambda *_: None)
    assert notes[0] == notes[1]
    assert len(notes[0]) > 20


def test_confidences_decide_how_many_are_verified(target, requests, plain):
    """An adaptive schedule takes the drafter's confidences, and changes no byte."""
    speculative = {
        "method": "dspark",
        "model": dspark(),
        "num_speculative_tokens": 5,
        "adaptive": True,
        "step_times": [1.0 + (i * 7919 % 13) / 4 for i in range(256)],
    }
    llm = LLM(target, max_model_len=LIMIT, block_size=8, num_blocks=96, max_num_seqs=8, speculative=speculative)
    assert serve(llm, requests) == plain


# ---- checkpoints


def save(folder, tensors, config):
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config.save_pretrained(folder)


def deepspec_names(model):
    """A DSparkModel's tensors under the names of DeepSpec's checkpoints."""
    renamed = {}
    for name, tensor in model.state_dict().items():
        new = name.replace("network.encoder.fc", "fc").replace("network.encoder.output_norm_enc", "hidden_norm")
        renamed[new.removeprefix("network.").replace("confidence_head.", "confidence_head.proj.")] = tensor
    return renamed


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn", "dflash"])
def test_deepspec_checkpoints(tmp_path, target, requests, plain, kind):
    rank = 0 if kind == "dflash" else 8
    fields = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rms_norm_eps": 1e-5}
    config = deepspec_config("vanilla" if kind == "dflash" else kind, rank, rank > 0, **fields)
    model = scattered(dspark_model.from_config(config))
    tensors = deepspec_names(model)
    assert {"fc.weight", "hidden_norm.weight", "norm.weight", "layers.1.self_attn.q_norm.weight"} <= set(tensors)
    assert not rank or {"markov_head.markov_w1.weight", "confidence_head.proj.bias"} <= set(tensors)
    shared = {name: torch.zeros(VOCABULARY, 32) for name in ("embed_tokens.weight", "lm_head.weight")}
    save(tmp_path, {**tensors, **shared}, config)
    loaded = dspark_model.load(str(tmp_path), "quartz", torch.bfloat16)
    assert loaded.network.config.rope_parameters["rope_theta"] == 1e6
    assert loaded.network.config.rms_norm_eps == 1e-5
    expected = model.to("quartz", torch.bfloat16).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())
    assert serve(engine(target, "dspark", str(tmp_path)), requests) == plain


def test_a_checkpoint_of_the_assistant(tmp_path, target, requests, plain):
    network = muse_network()
    network.save_pretrained(tmp_path)
    loaded = dspark_model.load(tmp_path, "quartz", torch.bfloat16)
    assert (loaded.first_row, loaded.most_drafts) == (1, 11)
    expected = network.to("quartz", torch.bfloat16).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.network.state_dict().items())
    assert serve(engine(target, "dspark", tmp_path), requests) == plain


def mtp_checkpoint(folder, model, head, name):
    """Save a model with its head as the published checkpoints of its family have it."""
    model.save_pretrained(folder)
    count, tensors = model.config.num_hidden_layers, {}
    for key, tensor in head.layers[0].state_dict().items():
        old = key.removeprefix("mtp_block.")
        layer = "mtp.layers.0" if name == "qwen3_next" else f"model.layers.{count}"
        outside = {
            "enorm": "pre_fc_norm_embedding",
            "hnorm": "pre_fc_norm_hidden",
            "eh_proj": "fc",
            "post_norm": "norm",
        }
        part = old.split(".")[0]
        if old.endswith("experts.gate_up_proj"):
            for i, expert in enumerate(tensor):
                gate, up = expert.chunk(2)
                tensors[f"{layer}.mlp.experts.{i}.gate_proj.weight"] = gate
                tensors[f"{layer}.mlp.experts.{i}.up_proj.weight"] = up
        elif old.endswith("experts.down_proj"):
            tensors.update({f"{layer}.mlp.experts.{i}.down_proj.weight": expert for i, expert in enumerate(tensor)})
        elif name == "qwen3_next" and part in outside:
            tensors[f"mtp.{outside[part]}.weight"] = tensor
        else:
            tensors[f"{layer}.{old.replace('post_norm', 'shared_head.norm')}"] = tensor
    if name != "qwen3_next":
        tensors[f"model.layers.{count}.embed_tokens.weight"] = torch.zeros(VOCABULARY, 32)
        tensors[f"model.layers.{count}.shared_head.head.weight"] = torch.zeros(VOCABULARY, 32)
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    whole = {**load_file(file), **{key: tensor.contiguous().cpu() for key, tensor in tensors.items()}}
    save_file(whole, file, metadata={"format": "pt"})


@pytest.mark.parametrize("name", MTP)
def test_checkpoints_with_a_multi_token_head(tmp_path, requests, name):
    from transformers import AutoModelForCausalLM

    model = mtp_target(name)
    head = mtp_head(model).to("quartz", torch.bfloat16)
    mtp_checkpoint(tmp_path, model, head, name)
    if name == "qwen3_next":
        del model.config.num_mtp_layers, model.config.mtp_layer_types
        model.config.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, device_map="quartz").eval()
    before = dict(loaded.config.__dict__)
    llm = engine(loaded, "mtp", None)
    assert loaded.config.__dict__ == before
    expected = head.layers.state_dict()
    got = drafter_of(llm)._head.layers.state_dict()
    assert got.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in got.items())
    assert serve(llm, requests) == serve(engine(loaded), requests)
    own = drafter_of(llm)._head.layers.parameters()  # without the target's embeddings and output
    assert llm.memory_report()["drafter"] == sum(p.numel() * p.element_size() for p in own)


# ---- what does not fit


def refused(error, message, target, *arguments, **options):
    with pytest.raises(error, match=message):
        engine(target, *arguments, **options)


def test_draft_models_that_do_not_fit(target):
    refused(ValueError, "vocabulary of 96 tokens", target, "draft_model", tiny("llama", 1, vocab_size=80))
    short = build("llama", max_position_embeddings=LIMIT // 2)
    refused(ValueError, f"at least the {LIMIT} positions", target, "draft_model", short)
    refused(NotImplementedError, "recurrent", target, "draft_model", tiny("qwen3_next", 1))


def test_block_drafters_that_do_not_fit(tmp_path, target):
    refused(ValueError, "at most the 7 drafts", target, "dspark", dspark(), drafts=8)
    refused(ValueError, "at most the 11 drafts", target, "dspark", muse_network(), drafts=12)
    refused(NotImplementedError, "got Linear", target, "dspark", torch.nn.Linear(2, 2))

    def other(**fields):
        return dspark_model.from_config(deepspec_config(**fields))

    refused(ValueError, "layers of the target, -1 to 3", target, "dspark", other(target_layer_ids=[1, 4]))
    refused(ValueError, "Markov head over the target's 96", target, "dspark", other(vocab_size=80))
    config = deepspec_config()
    config.mask_token_id = VOCABULARY
    refused(ValueError, "mask token among", target, "dspark", dspark_model.from_config(config))
    config = deepspec_config()
    config.hidden_size = 16
    refused(ValueError, "hidden size of 32", target, "dspark", dspark_model.from_config(config))
    config = deepspec_config(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    refused(NotImplementedError, "rope_type 'dynamic'", target, "dspark", dspark_model.from_config(config))
    network = muse_network()
    network.config.sliding_window = 10
    refused(ValueError, "window of at least its block of 12 rows", target, "dspark", network)
    with pytest.raises(ValueError, match="markov_head_type must be one of"):
        other(kind="other")
    with pytest.raises(NotImplementedError, match="biases"):
        other(attention_bias=True)


def test_checkpoints_of_block_drafters_that_are_broken(tmp_path, target):
    config = deepspec_config()
    tensors = deepspec_names(dspark_model.from_config(config))
    save(tmp_path, {k: v for k, v in tensors.items() if k != "fc.weight"}, config)
    refused(ValueError, r"without \['network.encoder.fc.weight'\]", target, "dspark", tmp_path)
    save(tmp_path, {**tensors, "layers.0.extra": torch.zeros(1)}, config)
    refused(ValueError, r"with \['network.layers.0.extra'\]", target, "dspark", tmp_path)
    save(tmp_path, {**tensors, "fc.weight": torch.zeros(1, 1)}, config)
    refused(ValueError, "does not fit", target, "dspark", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    refused(ValueError, "safetensors", target, "dspark", tmp_path)
    config.architectures = ["Gemma4DSparkModel"]
    config.save_pretrained(tmp_path)
    refused(NotImplementedError, "Gemma4DSparkModel", target, "dspark", tmp_path)


def test_models_without_a_multi_token_head(tmp_path, target):
    refused(ValueError, "must be given", target, "mtp", None)
    target.save_pretrained(tmp_path)
    refused(ValueError, "without a multi-token head", target, "mtp", tmp_path)
    refused(NotImplementedError, "got Linear", target, "mtp", torch.nn.Linear(2, 2))
    model = mtp_target("deepseek_v3")
    model.save_pretrained(tmp_path / "without")  # the configuration names a head that the files do not have
    refused(ValueError, "whole multi-token head", model, "mtp", tmp_path / "without")


def test_a_version_of_transformers_without_the_modules(monkeypatch):
    from torch_quartz.engine.drafters import mtp

    model = mtp_target("deepseek_v3")
    monkeypatch.setitem(sys.modules, "transformers.modeling_layers", SimpleNamespace())
    with pytest.raises(NotImplementedError, match=r"MtpModel.*5\.24"):
        mtp.load("somewhere", model, "quartz")
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace())
    with pytest.raises(NotImplementedError, match=r"MuseGlimmerAssistantModel.*5\.24"):
        dspark_model.load("somewhere", "quartz", torch.bfloat16)


def test_factory():
    from torch_quartz.engine import drafters

    for method, name in (("draft_model", "ModelDrafter"), ("mtp", "MTPDrafter"), ("dspark", "DSparkDrafter")):
        config = SimpleNamespace(method=method, model="somewhere", num_speculative_tokens=3)
        drafter = drafters.make_drafter(config)
        assert (type(drafter).__name__, drafter.max_drafts) == (name, 3)
