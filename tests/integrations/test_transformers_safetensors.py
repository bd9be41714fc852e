"""safetensors straight onto the device (case B5)."""

import pytest
import safetensors
import torch
from safetensors.torch import load_file, load_model, save_file, save_model
from transformers_jobs import lies_in_file, same_bits

TENSORS = {
    "w": torch.arange(12.0).reshape(3, 4),
    "s": torch.tensor(2.0),
    "h": torch.arange(5, dtype=torch.bfloat16),
    "i": torch.tensor([[-1, 2], [3, -4]], dtype=torch.int8),
    "e": torch.empty(0, 3),
    "f": torch.tensor([0.5, 1.5]).to(torch.float8_e4m3fn),
}
DEVICES = ["quartz", "quartz:0", torch.device("quartz"), torch.device("quartz", 0), 0]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "tensors.safetensors"
    save_file(TENSORS, path, metadata={"format": "pt", "note": "kept"})
    return path


def assert_same(tensors):
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in tensors.items():
        assert tensor.device == torch.device("quartz:0") and tensor.dtype == TENSORS[name].dtype, name
        ours, theirs = (
            value.cpu().view(torch.uint8) if name == "f" else value.cpu() for value in (tensor, TENSORS[name])
        )
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("device", DEVICES)
def test_load_file(file, device):
    assert_same(load_file(file, device=device))
    assert_same(load_file(str(file), device=device))


@pytest.mark.parametrize("device", DEVICES)
def test_safe_open(file, device):
    with safetensors.safe_open(file, "pt", device=device) as handle:
        assert isinstance(handle, safetensors.safe_open)
        assert set(handle.keys()) == set(TENSORS) and handle.metadata()["note"] == "kept"
        assert_same({name: handle.get_tensor(name) for name in handle.keys()})  # noqa: SIM118
        assert_same(handle.get_tensors())
        part = handle.get_slice("w")
        assert part.get_shape() == [3, 4] and part.get_dtype() == "F32"
        assert part[1:, ::2].device.type == "quartz"
        assert torch.equal(part[1:, ::2].cpu(), TENSORS["w"][1:, ::2])


def test_tensors_are_writable_and_outlive_the_file(file):
    with safetensors.safe_open(file, "pt", device="quartz") as handle:
        tensor = handle.get_tensor("w")
    tensor += 1
    assert torch.equal(tensor.cpu(), TENSORS["w"] + 1)
    assert torch.equal(load_file(file)["w"], TENSORS["w"])
    file.unlink()
    assert torch.equal(tensor.cpu(), TENSORS["w"] + 1)


@pytest.mark.host
def test_nothing_is_copied_on_host_memory(tmp_path):
    path = tmp_path / "large.safetensors"
    save_file({"w": torch.ones(1024, 1024)}, path)
    tensor = load_file(path, device="quartz")["w"]
    assert lies_in_file(tensor, path)
    assert tensor.sum().item() == 1024 * 1024


def test_save_file_and_models_of_the_device(tmp_path):
    tensors = {name: value.to("quartz") for name, value in TENSORS.items()}
    save_file(tensors, tmp_path / "device.safetensors")
    save_file(TENSORS, tmp_path / "host.safetensors")
    assert (tmp_path / "device.safetensors").read_bytes() == (tmp_path / "host.safetensors").read_bytes()
    model, other = torch.nn.Linear(3, 2).to("quartz"), torch.nn.Linear(3, 2).to("quartz")
    save_model(model, str(tmp_path / "model.safetensors"))
    load_model(other, str(tmp_path / "model.safetensors"), device="quartz")
    assert same_bits(model.weight.detach().cpu(), other.weight.detach().cpu())


def test_shared_storage_is_noticed(tmp_path):
    base = torch.arange(6.0, device="quartz")
    with pytest.raises(RuntimeError, match="share memory"):
        save_file({"a": base, "b": base}, tmp_path / "shared.safetensors")


def test_bad_devices_are_refused(file):
    with pytest.raises(RuntimeError, match="invalid device ordinal 9"):
        load_file(file, device="quartz:9")
    with pytest.raises(safetensors.SafetensorError):
        load_file(file, device="quarz")
    assert_same(load_file(file, device="quartz"))


@pytest.mark.two_devices
def test_second_device(file):
    assert load_file(file, device="quartz:1")["w"].device == torch.device("quartz:1")
    assert load_file(file, device=1)["w"].device == torch.device("quartz:1")


def test_other_devices_and_frameworks_are_untouched(file):
    assert load_file(file)["w"].device.type == "cpu"
    with pytest.raises(safetensors.SafetensorError, match="meta is invalid"):
        load_file(file, device="meta")
    with safetensors.safe_open(file, framework="np") as handle:
        assert handle.get_tensor("w").tolist() == TENSORS["w"].tolist()
