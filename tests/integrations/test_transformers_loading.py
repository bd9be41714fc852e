"""``from_pretrained`` with every form of ``device_map`` (case B4), offloading, sharded files, ``save_pretrained``."""

import pytest
import torch
import transformers_jobs as jobs
from model_zoo import build
from transformers import AutoModelForCausalLM


def load(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


@pytest.fixture(scope="module")
def expected(checkpoint):
    """The state and the greedy tokens of the checkpoint on the CPU."""
    model = load(checkpoint)
    tokens = model.generate(**jobs.prompt("cpu"), max_new_tokens=6, do_sample=False)
    return model.state_dict(), tokens


def assert_same_model(model, expected, device):
    """Assert state, tokens and the device of every tensor; a device without an index allows every index."""

    def lies_there(tensor):
        wanted = torch.device(device)
        return tensor.device.type == wanted.type and wanted.index in (None, tensor.device.index)

    state, tokens = expected
    for name, parameter in model.named_parameters():
        assert lies_there(parameter), name
        assert jobs.same_bits(parameter.detach().cpu(), state[name]), name
    assert all(map(lies_there, model.buffers()))
    ours = model.generate(**jobs.prompt(device), max_new_tokens=6, do_sample=False)
    assert torch.equal(ours.cpu(), tokens)


MAPS = {
    "name": "quartz",
    "name and index": "quartz:0",
    "device": torch.device("quartz"),
    "device and index": torch.device("quartz", 0),
    "auto": "auto",
    "balanced": "balanced",
    "balanced_low_0": "balanced_low_0",
    "sequential": "sequential",
    "integer": 0,
    "dict with an integer": {"": 0},
    "dict with a name": {"": "quartz:0"},
    "dict with a device": {"": torch.device("quartz:0")},
    "dict of modules": {"model": 0, "lm_head": "quartz"},
}


@pytest.mark.parametrize("form", list(MAPS))
def test_device_map_puts_every_parameter_on_the_device(checkpoint, expected, form, explicit_import):
    spread = form in ("auto", "balanced", "balanced_low_0")  # over every device there is
    assert_same_model(load(checkpoint, device_map=MAPS[form]), expected, "quartz" if spread else "quartz:0")


def test_default_device_and_context_reach_from_pretrained(checkpoint, expected):
    with torch.device("quartz"):
        model = load(checkpoint)
    assert_same_model(model, expected, "quartz:0")
    torch.set_default_device("quartz")
    try:
        model = load(checkpoint)
    finally:
        torch.set_default_device(None)
    assert_same_model(model, expected, "quartz:0")


def test_to_and_quartz_method_move_a_model_and_keep_its_ties(checkpoint, expected):
    assert_same_model(load(checkpoint).to("quartz"), expected, "quartz:0")
    assert_same_model(load(checkpoint).quartz(), expected, "quartz:0")
    tied = build("llama", tie_word_embeddings=True)
    assert tied.to("quartz").lm_head.weight is tied.model.embed_tokens.weight


def test_map_that_names_the_cpu_for_the_last_layer(checkpoint, expected):
    """accelerate treats "cpu" beside an accelerator as offloading: the layer computes on the accelerator."""
    rows = {f"model.layers.{i}": "cpu" if i == 3 else 0 for i in range(4)}
    device_map = {"model.embed_tokens": 0, "model.norm": 0, "model.rotary_emb": 0, "lm_head": 0, **rows}
    model = load(checkpoint, device_map=device_map)
    assert model.hf_device_map == device_map
    for name, parameter in model.named_parameters():
        assert parameter.device.type == ("meta" if ".3." in name else "quartz"), name
    tokens = model.generate(**jobs.prompt("quartz"), max_new_tokens=6, do_sample=False)
    assert torch.equal(tokens.cpu(), expected[1])


def test_disk_offload(checkpoint, expected, tmp_path):
    rows = {f"model.layers.{i}": "disk" if i >= 2 else "quartz:0" for i in range(4)}
    device_map = {"model.embed_tokens": "quartz:0", "model.norm": "quartz:0", "model.rotary_emb": "quartz:0", **rows}
    model = load(checkpoint, device_map={**device_map, "lm_head": "quartz:0"}, offload_folder=tmp_path)
    tokens = model.generate(**jobs.prompt("quartz"), max_new_tokens=6, do_sample=False)
    assert torch.equal(tokens.cpu(), expected[1])


@pytest.mark.two_devices
@pytest.mark.parametrize(
    "device_map", ["auto", "balanced", {"model": 0, "lm_head": 1}, {"model": "quartz:1", "lm_head": 0}]
)
def test_split_over_two_devices(checkpoint, expected, device_map, explicit_import):
    model = load(checkpoint, device_map=device_map)
    assert {parameter.device for parameter in model.parameters()} == {
        torch.device("quartz:0"),
        torch.device("quartz:1"),
    }
    tokens = model.generate(**jobs.prompt("quartz"), max_new_tokens=6, do_sample=False)
    assert torch.equal(tokens.cpu(), expected[1])


@pytest.mark.two_devices
def test_second_device(checkpoint, expected):
    assert_same_model(load(checkpoint, device_map="quartz:1"), expected, "quartz:1")
    assert_same_model(load(checkpoint, device_map=1), expected, "quartz:1")


@pytest.mark.parametrize("key", [0, "quartz", "quartz:0", torch.device("quartz:0")])
def test_max_memory_names_the_device(checkpoint, key, explicit_import):
    whole = load(checkpoint, device_map="auto", max_memory={key: "1GB", "cpu": "1GB"})
    assert {parameter.device.type for parameter in whole.parameters()} == {"quartz"}
    part = load(checkpoint, device_map="auto", max_memory={key: 120_000, "cpu": "1GB"})
    assert {parameter.device.type for parameter in part.parameters()} == {"quartz", "meta"}
    assert set(part.hf_device_map.values()) == {0, "cpu"}


@pytest.mark.parametrize("key", [0, "quartz", "quartz:0", torch.device("quartz:0")])
def test_reserved_memory_does_not_exceed_max_memory(monkeypatch, key, explicit_import):
    from transformers.integrations.accelerate import get_max_memory

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 1 << 20)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    assert get_max_memory({key: "1KB", "cpu": "2KB"}) == {0: 1000, "cpu": 2000}


def test_unknown_devices_are_refused_and_the_next_load_works(checkpoint, expected):
    with pytest.raises(ValueError, match="quarz"):
        load(checkpoint, device_map="quarz")
    with pytest.raises(RuntimeError, match="invalid device ordinal 9"):
        load(checkpoint, device_map="quartz:9")
    with pytest.raises(ValueError, match="9"):
        load(checkpoint, device_map="auto", max_memory={"quartz:9": "1GB"})
    assert_same_model(load(checkpoint, device_map="quartz"), expected, "quartz:0")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, "auto"])
def test_dtype_is_converted_on_the_way(checkpoint, dtype):
    model = load(checkpoint, device_map="quartz", dtype=dtype)
    reference = load(checkpoint, dtype=dtype)
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert ours.device.type == "quartz" and jobs.same_bits(ours.detach().cpu(), theirs.detach()), name


@pytest.mark.parametrize("asynchronous", ["0", "1"])
def test_sharded_checkpoint(tmp_path, monkeypatch, asynchronous):
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", asynchronous)
    model = build("qwen3_moe")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    loaded = load(tmp_path, device_map="quartz")
    for (name, ours), theirs in zip(loaded.named_parameters(), model.parameters(), strict=True):
        assert ours.device.type == "quartz" and jobs.same_bits(ours.detach().cpu(), theirs.detach()), name


def test_pickled_checkpoint(tmp_path):
    model = build("llama")
    model.config.save_pretrained(tmp_path)
    torch.save(model.to("quartz").state_dict(), tmp_path / "pytorch_model.bin")
    loaded = load(tmp_path, device_map="quartz")
    for (name, ours), theirs in zip(loaded.named_parameters(), model.parameters(), strict=True):
        assert ours.device.type == "quartz" and jobs.same_bits(ours.detach().cpu(), theirs.detach().cpu()), name


def test_save_pretrained_round_trip_from_the_device(tmp_path):
    model = build("llama", tie_word_embeddings=True).to("quartz")
    model.save_pretrained(tmp_path / "first")
    again = load(tmp_path / "first", device_map="quartz")
    again.save_pretrained(tmp_path / "second")
    files = [next((tmp_path / part).glob("*.safetensors")).read_bytes() for part in ("first", "second")]
    assert files[0] == files[1]
    on_cpu = load(tmp_path / "second")
    for (name, ours), theirs in zip(on_cpu.named_parameters(), model.parameters(), strict=True):
        assert jobs.same_bits(ours.detach(), theirs.detach().cpu()), name


def test_saving_over_the_file_a_model_was_loaded_from(tmp_path):
    build("llama").save_pretrained(tmp_path)
    model = load(tmp_path, device_map="quartz")
    before = {name: value.detach().cpu() for name, value in model.named_parameters()}
    model.save_pretrained(tmp_path)
    again = load(tmp_path, device_map="quartz")
    for name, value in again.named_parameters():
        assert jobs.same_bits(value.detach().cpu(), before[name]), name
        assert jobs.same_bits(model.get_parameter(name).detach().cpu(), before[name]), name


def test_a_loaded_model_does_not_share_memory_with_the_program_or_the_file(tmp_path):
    model = build("llama")
    model.save_pretrained(tmp_path)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    from_file = load(tmp_path, device_map="quartz")
    from_program = type(model).from_pretrained(None, config=model.config, state_dict=state, device_map="quartz")
    for loaded in (from_file, from_program):
        with torch.no_grad():
            for parameter in loaded.parameters():
                parameter.zero_()
    assert all(jobs.same_bits(state[name], value) for name, value in model.state_dict().items())
    again = load(tmp_path, device_map="quartz")
    assert jobs.same_bits(again.lm_head.weight.detach().cpu(), model.lm_head.weight.detach())


@pytest.mark.host
def test_weights_are_adopted_from_the_file_without_a_copy(tmp_path):
    build("llama").save_pretrained(tmp_path)
    loaded = load(tmp_path, device_map="quartz")
    assert all(jobs.lies_in_file(value, tmp_path / "model.safetensors") for value in loaded.parameters())
    halves = load(tmp_path, device_map="quartz", dtype=torch.bfloat16)
    assert not jobs.lies_in_file(halves.lm_head.weight, tmp_path / "model.safetensors")


def test_loading_does_not_allocate_the_model_twice(tmp_path):
    model = build("llama", hidden_size=256, vocab_size=4096)
    model.save_pretrained(tmp_path)
    torch.quartz.empty_cache()
    torch.quartz.reset_peak_memory_stats()
    before = torch.quartz.memory_allocated()
    loaded = load(tmp_path, device_map="quartz")
    weights = sum(value.nbytes for value in loaded.parameters())
    assert torch.quartz.max_memory_allocated() - before <= 1.1 * weights + 2**21
