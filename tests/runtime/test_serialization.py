"""Saving, loading, pickling, copying."""

import copy
import io
import pickle

import pytest
import torch


@pytest.fixture
def saved(tmp_path):
    t = torch.arange(12, dtype=torch.float32, device="quartz:0").reshape(3, 4)
    path = tmp_path / "tensors.pt"
    torch.save({"a": t, "b": t[1:]}, path)
    return path


MAP_LOCATIONS = {
    "none": (None, "quartz:0"),
    "cpu": ("cpu", "cpu"),
    "device type": ("quartz", "quartz:0"),
    "device": ("quartz:0", "quartz:0"),
    "torch.device": (torch.device("quartz"), "quartz:0"),
    "torch.device with index": (torch.device("quartz", 0), "quartz:0"),
    "dictionary": ({"quartz:0": "cpu"}, "cpu"),
    "dictionary without a match": ({"cuda:0": "cpu"}, "quartz:0"),
    "function": (lambda storage, location: storage, "cpu"),
    "function that moves": (lambda storage, location: storage.quartz(0), "quartz:0"),
}


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("name", MAP_LOCATIONS)
@pytest.mark.parametrize("mmap", [False, True])
def test_load_with_every_map_location(saved, name, weights_only, mmap):
    location, device = MAP_LOCATIONS[name]
    loaded = torch.load(saved, map_location=location, weights_only=weights_only, mmap=mmap)
    a, b = loaded["a"], loaded["b"]
    assert a.device == b.device == torch.device(device)
    assert torch.equal(a.cpu(), torch.arange(12.0).reshape(3, 4)) and torch.equal(b.cpu(), a.cpu()[1:])
    assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    b.fill_(-1)
    assert a[1:].eq(-1).all()


def test_a_cpu_file_loads_onto_quartz(tmp_path):
    torch.save(torch.ones(3), tmp_path / "t.pt")
    for location in ("quartz", "quartz:0", torch.device("quartz")):
        assert torch.load(tmp_path / "t.pt", map_location=location).device.type == "quartz"


def test_load_to_meta_and_back(saved):
    meta = torch.load(saved, map_location="meta")["a"]
    assert meta.is_meta and meta.shape == (3, 4)
    assert torch.empty_like(meta, device="quartz").shape == (3, 4)


def test_load_onto_a_missing_device(saved):
    with pytest.raises(RuntimeError, match=r"quartz|QUARTZ"):
        torch.load(saved, map_location="quartz:9")
    assert torch.load(saved)["a"].device == torch.device("quartz:0")


@pytest.mark.host
def test_a_file_of_a_second_device(run_python, tmp_path):
    path = tmp_path / "second.pt"
    run_python(
        "import sys, torch, torch_quartz; torch.save(torch.ones(2, device='quartz:1'), sys.argv[1])",
        environment={"TORCH_QUARTZ_HOST_DEVICES": "2"},
        arguments=[path],
    )
    if torch.quartz.device_count() < 2:
        with pytest.raises(RuntimeError, match=r"QUARTZ device 1 but torch.quartz.device_count\(\) is 1"):
            torch.load(path)
    assert torch.load(path, map_location="quartz:0").tolist() == [1, 1]


def test_where_the_package_is_missing(saved, run_python):
    # The message is PyTorch's; docs/errors.md says what to do about it.
    run_python(
        """
        import sys, torch
        try:
            torch.load(sys.argv[1])
        except RuntimeError as error:
            assert "tagged with quartz:0" in str(error), error
        else:
            raise SystemExit("loaded")
        assert torch.load(sys.argv[1], map_location="cpu")["a"][1, 1] == 5
        assert "torch_quartz" not in sys.modules
        """,
        arguments=[saved],
    )


def test_a_training_checkpoint(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)).to("quartz")
    optimizer = torch.optim.Adam(model.parameters())

    def step():
        optimizer.zero_grad()
        model(torch.randn(8, 4, device="quartz")).sum().backward()
        optimizer.step()

    step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.quartz.get_rng_state()}
    torch.save(state, tmp_path / "checkpoint.pt")
    step()
    expected = [p.clone() for p in model.parameters()]
    loaded = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    torch.quartz.set_rng_state(loaded["rng"].cpu())
    assert all(v.device.type == "quartz" for s in optimizer.state.values() for k, v in s.items() if k != "step")
    step()
    assert all(torch.equal(p, e) for p, e in zip(model.parameters(), expected, strict=True))


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickle(protocol):
    x = torch.randn(3, 4, device="quartz")
    parameter = torch.nn.Parameter(x[1:], requires_grad=False)
    y, p = pickle.loads(pickle.dumps((x, parameter), protocol))
    assert y.device == x.device and torch.equal(x, y)
    assert isinstance(p, torch.nn.Parameter) and not p.requires_grad and torch.equal(p, parameter)


DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int64,
    torch.uint16,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_survives(dtype):
    x = torch.arange(8, device="quartz").to(dtype)
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    y = torch.load(buffer)
    assert y.dtype == dtype and y.device == x.device
    assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))
    assert torch.equal(copy.deepcopy(x).view(torch.uint8), x.view(torch.uint8))


LAYOUTS = {
    "transposed": lambda d: torch.randn(3, 4, device=d).t(),
    "channels_last": lambda d: torch.randn(2, 3, 4, 5, device=d).to(memory_format=torch.channels_last),
    "strided": lambda d: torch.randn(3, 4, device=d)[::2, 1:],
    "expanded": lambda d: torch.randn(3, device=d).expand(2, 3),
    "conj": lambda d: torch.randn(3, dtype=torch.complex64, device=d).conj(),
    "neg": lambda d: torch.randn(3, dtype=torch.complex64, device=d).conj().imag,
    "empty": lambda d: torch.empty(0, 3, device=d),
    "scalar": lambda d: torch.ones((), device=d),
    "coo": lambda d: torch.eye(3, device=d).to_sparse(),
    "csr": lambda d: torch.eye(3, device=d).to_sparse_csr(),
}


def round_trips(x):
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    return torch.load(buffer), copy.deepcopy(x), pickle.loads(pickle.dumps(x))


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_survive(name):
    x = LAYOUTS[name]("quartz")
    results = round_trips(x)
    for y in results:
        assert y.device == x.device and y.shape == x.shape and y.layout == x.layout
        assert torch.equal(y.to_dense().cpu(), x.to_dense().cpu())
    if x.layout == torch.strided:
        for y, reference in zip(results, round_trips(LAYOUTS[name]("cpu")), strict=True):
            assert y.stride() == reference.stride()
            assert y.is_conj() == reference.is_conj() and y.is_neg() == reference.is_neg()


def test_deepcopy():
    x = torch.randn(4, device="quartz", requires_grad=True)
    pair = copy.deepcopy([x, x])
    assert pair[0] is pair[1] and pair[0] is not x and pair[0].requires_grad
    assert pair[0].data_ptr() != x.data_ptr() and torch.equal(pair[0], x)
    model = torch.nn.Linear(2, 2).to("quartz")
    twin = copy.deepcopy(model)
    assert torch.equal(twin.weight, model.weight) and twin.weight.device == model.weight.device
    model.weight.data.zero_()
    assert not torch.equal(twin.weight, model.weight)
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(x * 2)
    assert torch.equal(copy.copy(x), x)


def test_jit_save_and_load(tmp_path):
    traced = torch.jit.trace(torch.nn.Linear(3, 2), torch.ones(1, 3))
    traced.save(tmp_path / "m.pt")
    module = torch.jit.load(tmp_path / "m.pt").to("quartz")
    assert module(torch.ones(1, 3, device="quartz")).device.type == "quartz"
