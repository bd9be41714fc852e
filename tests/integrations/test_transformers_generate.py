"""Every way to generate: the tokens and scores of the native device."""

import threading

import pytest
import torch
import transformers_jobs as jobs
from model_zoo import build


@pytest.mark.parametrize("name", list(jobs.GENERATION))
def test_generation_equals_the_native_device(name):
    jobs.compare(f"generate {name}")


def test_drafted_tokens_do_not_change_the_text():
    assert torch.equal(jobs.assisted("quartz")["tokens"], jobs.generate("quartz", rows=1)["tokens"])


@pytest.mark.parametrize("kind", ["offloaded", "offloaded_static"])
def test_offloaded_cache_gives_the_tokens_of_the_resident_cache(kind):
    offloaded = jobs.generate("quartz", cache_implementation=kind, disable_compile=True)
    assert torch.equal(offloaded["tokens"], jobs.generate("quartz")["tokens"])


def test_offloaded_cache_object_keeps_only_the_layers_in_use_on_the_device():
    from transformers import DynamicCache

    model = build("llama", num_hidden_layers=4).to("quartz")
    cache = DynamicCache(config=model.config, offloading=True)
    model(**jobs.prompt("quartz"), past_key_values=cache, use_cache=True)
    devices = [layer.keys.device.type for layer in cache.layers]
    assert "cpu" in devices and set(devices) <= {"cpu", "quartz"}


def test_streamer_yields_text_from_another_thread(word_tokenizer):
    from transformers import TextIteratorStreamer

    model = build("llama").to("quartz")
    inputs = word_tokenizer(["w5 w6 w7"], return_tensors="pt").to("quartz")
    streamer = TextIteratorStreamer(word_tokenizer, skip_prompt=True, timeout=60)
    thread = threading.Thread(
        target=model.generate, kwargs={**inputs, "streamer": streamer, "max_new_tokens": 5, "do_sample": False}
    )
    thread.start()
    text = "".join(streamer)
    thread.join()
    tokens = model.generate(**inputs, max_new_tokens=5, do_sample=False)[0, 3:]
    assert text.split() == word_tokenizer.decode(tokens).split()


def test_sampling_is_repeatable_and_follows_the_seed():
    def draw(seed):
        model = build("llama").to("quartz")
        torch.manual_seed(seed)
        return model.generate(**jobs.prompt("quartz"), do_sample=True, max_new_tokens=12)

    first, again, other = draw(3), draw(3), draw(4)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_inputs_on_another_device_are_named():
    model = build("llama").to("quartz")
    with pytest.raises(RuntimeError, match=r"quartz|same device"):
        model(input_ids=torch.tensor([[4, 5, 6]]))
    assert model(input_ids=torch.tensor([[4, 5, 6]], device="quartz")).logits.isfinite().all()
