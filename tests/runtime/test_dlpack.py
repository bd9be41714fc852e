"""DLPack in both directions, and NumPy."""

import ctypes

import numpy as np
import pytest
import torch
import torch_quartz
from torch.utils import dlpack
from torch_quartz.device import native_device

K_DL_CPU, K_DL_CUDA = 1, 2


def kind():
    return K_DL_CUDA if torch.quartz.substrate() == "cuda" else K_DL_CPU


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16, torch.complex64, torch.bool])
def test_round_trip_shares_memory(dtype):
    x = torch.ones(3, 4, device="quartz").to(dtype)
    assert x.__dlpack_device__() == (kind(), 0)
    native = torch.from_dlpack(x)
    assert native.device.type == native_device(0).type and native.data_ptr() == x.data_ptr()
    back = torch.quartz.from_dlpack(x)
    assert back.device == x.device and back.data_ptr() == x.data_ptr() and torch.equal(back, x)
    back.zero_()
    assert x.eq(0).all() and native.eq(0).all()


def test_strides_and_offsets():
    x = torch.arange(24.0, device="quartz").reshape(4, 6)[1:, ::2].t()
    y = torch.quartz.from_dlpack(x)
    assert y.stride() == x.stride() and y.data_ptr() == x.data_ptr() and torch.equal(x, y)


def test_the_memory_lives_as_long_as_the_importer():
    x = torch.arange(1000.0, device="quartz")
    y = torch.quartz.from_dlpack(x)
    z = torch.from_dlpack(x)
    del x
    torch.quartz.empty_cache()
    torch.full((1000,), -1.0, device="quartz")
    assert y.sum().item() == z.sum().item() == 499500


def test_capsules():
    x = torch.arange(4.0, device="quartz")
    capsule = x.__dlpack__()
    y = torch.quartz.from_dlpack(capsule)
    assert y.device == x.device and y.data_ptr() == x.data_ptr()
    # The function (not the method) makes a capsule of PyTorch's extension device, which only PyTorch reads.
    z = torch.quartz.from_dlpack(dlpack.to_dlpack(x))
    assert z.device == x.device and z.data_ptr() == x.data_ptr() and torch.equal(z, x)
    assert (z + 1).tolist() == [1, 2, 3, 4]
    w = dlpack.from_dlpack(dlpack.to_dlpack(x))
    assert w.device == x.device and (w * 2).tolist() == [0, 2, 4, 6]
    del x
    assert w.tolist() == [0, 1, 2, 3]


@pytest.mark.host
def test_numpy_reads_and_writes_quartz_memory():
    x = torch.zeros(2, 3, device="quartz")
    array = np.from_dlpack(x)
    assert array.ctypes.data == x.data_ptr() and array.shape == (2, 3)
    x.fill_(4)
    assert array.sum() == 24
    mine = np.arange(6.0, dtype=np.float32)
    y = torch.quartz.from_dlpack(mine)
    assert y.device.type == "quartz" and y.data_ptr() == mine.ctypes.data
    y.add_(1)
    assert mine[0] == 1 and y.device == torch.device("quartz:0")
    del mine
    assert y.sum().item() == 21


@pytest.mark.host
def test_any_buffer_with_dlpack():
    raw = torch.arange(4, dtype=torch.int32)
    y = torch.quartz.from_dlpack(raw)
    assert y.device.type == "quartz" and y.data_ptr() == raw.data_ptr()
    y += 1
    assert ctypes.c_int32.from_address(raw.data_ptr()).value == 1


@pytest.mark.cuda
def test_cuda_tensors():
    raw = torch.arange(4.0, device="cuda")
    y = torch.quartz.from_dlpack(raw)
    assert y.device == torch.device("quartz:0") and y.data_ptr() == raw.data_ptr()
    y.add_(1)
    assert raw.tolist() == [1, 2, 3, 4]


def test_what_cannot_be_exported():
    with pytest.raises(BufferError, match="require gradient"):
        torch.ones(2, device="quartz", requires_grad=True).__dlpack__()
    with pytest.raises(BufferError, match="conjugate"):
        torch.ones(2, dtype=torch.complex64, device="quartz").conj().__dlpack__()
    with pytest.raises(BufferError, match=r"layout|strided"):
        torch.eye(2, device="quartz").to_sparse().__dlpack__()


def test_other_devices_are_untouched():
    x = torch.ones(3)
    assert x.__dlpack_device__() == (K_DL_CPU, 0)
    assert torch.from_dlpack(x).data_ptr() == x.data_ptr()
    assert np.from_dlpack(x).sum() == 3


def test_undoing_the_patch():
    torch_quartz.undo_patches()
    try:
        with pytest.raises(ValueError, match="Unknown device type quartz for Dlpack"):
            torch.ones(1, device="quartz").__dlpack_device__()
        assert torch.ones(2, device="quartz").sum().item() == 2
    finally:
        torch_quartz.install_patches()
    assert torch.ones(1, device="quartz").__dlpack_device__() == (kind(), 0)


class TestNumpy:
    """As users of CUDA know it: a clear error, and a copy through ``.cpu()``."""

    @pytest.mark.parametrize(
        "convert", [lambda x: x.numpy(), np.asarray, np.array, np.exp], ids=["numpy", "asarray", "array", "ufunc"]
    )
    def test_implicit_conversion_is_refused(self, convert):
        with pytest.raises(TypeError, match=r"can't convert quartz:0 device type tensor to numpy. Use Tensor.cpu\(\)"):
            convert(torch.ones(3, device="quartz"))

    def test_through_the_cpu(self):
        x = torch.arange(3.0, device="quartz")
        assert x.cpu().numpy().tolist() == [0, 1, 2] == x.numpy(force=True).tolist() == x.tolist()

    def test_from_numpy(self):
        array = np.arange(3)
        assert torch.from_numpy(array).to("quartz").tolist() == [0, 1, 2]
        x = torch.tensor(array, device="quartz")
        y = torch.as_tensor(array, device="quartz")
        array[0] = 9
        assert x.tolist() == y.tolist() == [0, 1, 2]

    def test_numpy_scalars_and_indices(self):
        x = torch.arange(5.0, device="quartz")
        assert (x * np.float32(2)).tolist() == [0, 2, 4, 6, 8]
        assert x[np.int64(3)].item() == 3
        assert x[np.array([0, 2])].tolist() == [0, 2]
        assert (np.float64(2) * x).device.type == "quartz"
