"""``pipeline``: which device it runs on, and that its answers are the native device's."""

import pytest
import torch
from model_zoo import build
from transformers import pipeline

QUARTZ = torch.device("quartz:0")
TEXT = ["w5 w6 w7", "w8 w9 w10 w11 w12"]


@pytest.fixture
def saved(tmp_path, word_tokenizer):
    build("llama").save_pretrained(tmp_path)
    word_tokenizer.save_pretrained(tmp_path)
    return str(tmp_path)


def answers(pipe):
    outputs = pipe(TEXT, max_new_tokens=6, do_sample=False)
    return [row[0]["generated_text"] for row in outputs]


def assert_on_quartz(pipe, saved, device=QUARTZ):
    assert pipe.device.type == "quartz" and (pipe.device.index or 0) == device.index
    assert {parameter.device for parameter in pipe.model.parameters()} == {device}
    assert answers(pipe) == answers(pipeline("text-generation", model=saved, device="cpu"))


@pytest.mark.parametrize("device", ["quartz", "quartz:0", torch.device("quartz"), torch.device("quartz:0"), 0])
def test_device_argument(saved, device):
    assert_on_quartz(pipeline("text-generation", model=saved, device=device), saved)


@pytest.mark.parametrize("device_map", ["quartz", "quartz:0", torch.device("quartz:0"), 0, {"": 0}, {"": "quartz:0"}])
def test_device_map_argument(saved, device_map):
    assert_on_quartz(pipeline("text-generation", model=saved, device_map=device_map), saved)


def test_automatic_device_map(saved, explicit_import):
    pipe = pipeline("text-generation", model=saved, device_map="auto")  # over every device there is
    assert pipe.device.type == "quartz"
    assert {parameter.device.type for parameter in pipe.model.parameters()} == {"quartz"}
    assert answers(pipe) == answers(pipeline("text-generation", model=saved, device="cpu"))


@pytest.mark.parametrize("device", [None, 0, "quartz"])
def test_model_that_is_on_the_device_stays_there(saved, word_tokenizer, device):
    model = build("llama").to("quartz")
    pointer = model.lm_head.weight.data_ptr()
    pipe = pipeline("text-generation", model=model, tokenizer=word_tokenizer, device=device)
    assert_on_quartz(pipe, saved)
    assert model.lm_head.weight.data_ptr() == pointer


def test_no_device_at_all_follows_the_import(saved, explicit_import):
    assert_on_quartz(pipeline("text-generation", model=saved), saved)


@pytest.mark.parametrize("device", ["cpu", -1])
def test_the_cpu_stays_the_cpu_when_it_is_asked_for(saved, device):
    pipe = pipeline("text-generation", model=saved, device=device)
    assert pipe.device.type == "cpu" and pipe.model.device.type == "cpu"


def test_split_model(saved, word_tokenizer):
    from transformers import AutoModelForCausalLM

    device_map = {"model.embed_tokens": 0, "model.layers": 0, "model.norm": 0, "model.rotary_emb": 0, "lm_head": "cpu"}
    model = AutoModelForCausalLM.from_pretrained(saved, device_map=device_map)
    pipe = pipeline("text-generation", model=model, tokenizer=word_tokenizer)
    assert pipe.device == QUARTZ
    assert answers(pipe) == answers(pipeline("text-generation", model=saved, device="cpu"))


@pytest.mark.two_devices
def test_second_device(saved):
    second = torch.device("quartz:1")
    assert_on_quartz(pipeline("text-generation", model=saved, device="quartz:1"), saved, second)
    pipe = pipeline("text-generation", model=saved, device=1)
    assert_on_quartz(pipe, saved, second)
    with pipe.device_placement():
        assert torch.quartz.current_device() == 1
    assert torch.quartz.current_device() == 0


def test_batches_and_chat(saved, word_tokenizer):
    pipe = pipeline("text-generation", model=saved, device="quartz", batch_size=2)
    assert answers(pipe) == answers(pipeline("text-generation", model=saved, device="cpu", batch_size=2))
    word_tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    try:
        chat = pipeline("text-generation", model=pipe.model, tokenizer=word_tokenizer)
        output = chat([{"role": "user", "content": "w5 w6"}], max_new_tokens=3, do_sample=False)
    finally:
        word_tokenizer.chat_template = None
    assert output[0]["generated_text"][-1]["role"] == "assistant"


def test_other_tasks(word_tokenizer):
    def fill(device):
        pipe = pipeline("fill-mask", model=build("bert", pad_token_id=0), tokenizer=word_tokenizer, device=device)
        assert pipe.model.device.type == device
        return [row["token"] for row in pipe("w5 <unk> w7", top_k=3)]

    word_tokenizer.mask_token = "<unk>"
    try:
        assert fill("cpu") == fill("quartz")
    finally:
        word_tokenizer.mask_token = None
    features = pipeline("feature-extraction", model=build("bert").bert, tokenizer=word_tokenizer, device="quartz")
    assert len(features("w5 w6")[0]) == 2
