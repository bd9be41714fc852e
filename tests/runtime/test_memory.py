"""Memory statistics and running out of memory."""

import gc
import re

import pytest
import torch

MIB = 2**20


def test_live_bytes():
    gc.collect()
    before = torch.quartz.memory_allocated()
    x = torch.empty(3 * MIB, dtype=torch.uint8, device="quartz")
    assert torch.quartz.memory_allocated() == before + 3 * MIB == torch.accelerator.memory_allocated()
    view = x[5:]
    assert torch.quartz.memory_allocated() == before + 3 * MIB
    del x
    assert torch.quartz.memory_allocated() == before + 3 * MIB
    del view
    assert torch.quartz.memory_allocated() == before


def test_peak():
    gc.collect()
    torch.quartz.reset_peak_memory_stats()
    start = torch.quartz.memory_allocated()
    assert torch.quartz.max_memory_allocated() == start
    x = torch.empty(4 * MIB, dtype=torch.uint8, device="quartz")
    del x
    assert torch.quartz.memory_allocated() == start
    assert torch.quartz.max_memory_allocated() == start + 4 * MIB == torch.accelerator.max_memory_allocated()
    torch.quartz.reset_peak_memory_stats("quartz:0")
    assert torch.quartz.max_memory_allocated("quartz") == start


def test_results_of_operators_are_counted():
    # The native kernel allocates the result, not this project's allocator.
    x = torch.ones(MIB, device="quartz")
    before = torch.quartz.memory_allocated()
    y = x + 1
    assert torch.quartz.memory_allocated() == before + y.nbytes
    z = torch.cat([x, y])
    assert torch.quartz.memory_allocated() == before + y.nbytes + z.nbytes
    del y, z
    assert torch.quartz.memory_allocated() == before


def test_an_inplace_operator_allocates_nothing():
    x = torch.ones(MIB, device="quartz")
    torch.quartz.reset_peak_memory_stats()
    before = torch.quartz.memory_allocated()
    x.add_(1).mul_(2)
    torch.add(x, 1, out=x)
    assert torch.quartz.max_memory_allocated() == before


def test_fallback_calls_copy_nothing():
    x = torch.ones(2 * MIB, device="quartz")
    pointer = x.data_ptr()
    torch.quartz.reset_peak_memory_stats()
    before = torch.quartz.memory_allocated()
    y = x.view(1024, -1).t()[3:].transpose(0, 1)
    assert y.untyped_storage().data_ptr() == pointer
    x.sum()
    assert torch.quartz.max_memory_allocated() <= before + MIB // 8
    assert torch.quartz.native_alias(x).data_ptr() == pointer


def test_reserved_holds_what_is_allocated():
    x = torch.empty(MIB, device="quartz")
    assert torch.quartz.memory_reserved() >= torch.quartz.memory_allocated() >= x.nbytes
    assert torch.quartz.max_memory_reserved() >= torch.quartz.memory_reserved()
    torch.quartz.empty_cache()
    assert torch.quartz.memory_reserved() >= torch.quartz.memory_allocated()


def test_stats_have_the_names_of_cuda():
    torch.empty(8, device="quartz")
    stats = torch.quartz.memory_stats()
    for name in ("allocated_bytes", "reserved_bytes", "active_bytes", "allocation", "segment"):
        for kind in ("current", "peak", "allocated", "freed"):
            assert stats[f"{name}.all.{kind}"] >= 0, name
    assert stats["num_ooms"] >= 0
    nested = torch.quartz.memory_stats_as_nested_dict()
    assert nested["allocated_bytes"]["all"]["peak"] == torch.quartz.max_memory_allocated()


def test_accumulated_stats_can_be_reset():
    x = torch.empty(MIB, dtype=torch.uint8, device="quartz")
    torch.quartz.reset_accumulated_memory_stats()
    assert torch.quartz.memory_stats()["allocated_bytes.all.allocated"] == 0
    y = torch.empty(MIB, dtype=torch.uint8, device="quartz")
    assert torch.quartz.memory_stats()["allocated_bytes.all.allocated"] == MIB
    del x, y


def test_free_and_total():
    free, total = torch.quartz.mem_get_info()
    assert 0 < free <= total == torch.quartz.get_device_properties().total_memory
    assert torch.quartz.mem_get_info("quartz:0")[1] == total


def test_summary_is_readable():
    summary = torch.quartz.memory_summary()
    assert summary.startswith("quartz:0 memory") and "allocated bytes" in summary and "segments" in summary
    assert "segments" not in torch.quartz.memory_summary(abbreviated=True)


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.empty(1 << 47, dtype=torch.uint8, device="quartz"),
        lambda: torch.zeros(1 << 45, device="quartz"),
        lambda: torch.ones(1, device="quartz").expand(1 << 45).contiguous(),
        lambda: torch.ones(1, device="quartz").expand(1 << 45) + 1,
        lambda: torch.ones(1, dtype=torch.uint8, device="quartz").resize_(1 << 47),
    ],
    ids=["empty", "zeros", "contiguous", "operator", "resize"],
)
def test_out_of_memory(call):
    kept = torch.arange(1000, device="quartz")
    before, errors = torch.quartz.memory_allocated(), torch.quartz.memory_stats()["num_ooms"]
    with pytest.raises(torch.OutOfMemoryError) as caught:
        call()
    message = str(caught.value).splitlines()[0]
    assert any(asked in message for asked in ("140737488355328 bytes", "128.00 TiB", "131072.00 GiB"))
    assert "quartz:0" in message
    for word in ("allocated", "reserved", "free"):
        assert re.search(rf"\b{word} \d[\d.]* (bytes|[KMGT]iB)", message, re.IGNORECASE), (word, message)
    del caught
    assert torch.quartz.memory_allocated() == before
    assert torch.quartz.memory_stats()["num_ooms"] > errors
    assert torch.equal(kept.cpu(), torch.arange(1000)) and (kept + 1).sum().item() == 500500


def test_impossible_sizes_are_refused():
    with pytest.raises(RuntimeError, match="negative dimension"):
        torch.empty(-1, device="quartz")
    with pytest.raises(RuntimeError):
        torch.empty(1 << 40, 1 << 40, device="quartz")
    assert torch.ones(2, device="quartz").sum().item() == 2


def test_recovering_as_cuda_users_do():
    # torch.OutOfMemoryError is what the retry loops of training scripts and accelerate catch.
    sizes = [1 << 47, 1 << 10]
    for size in sizes:
        try:
            x = torch.empty(size, dtype=torch.uint8, device="quartz")
            break
        except torch.OutOfMemoryError:
            torch.quartz.empty_cache()
    assert x.numel() == 1 << 10


@pytest.mark.host
def test_what_only_cuda_has_says_so():
    calls = {
        "memory_snapshot": (),
        "set_per_process_memory_fraction": (0.5,),
        "get_per_process_memory_fraction": (),
        "MemPool": (),
        "set_sync_debug_mode": ("warn",),
        "utilization": (),
        "memory_usage": (),
        "device_memory_used": (),
        "temperature": ("quartz:0",),
        "power_draw": (),
        "clock_rate": (0,),
    }
    for name, arguments in calls.items():
        with pytest.raises(
            RuntimeError, match=f"torch.quartz.{name} needs the cuda substrate; this process runs on host"
        ):
            getattr(torch.quartz, name)(*arguments)
    with pytest.raises(RuntimeError, match="use_mem_pool needs the cuda substrate"), torch.quartz.use_mem_pool(None):
        pass
    torch.quartz.ipc_collect()
    assert torch.quartz.get_sync_debug_mode() == 0


@pytest.mark.cuda
def test_memory_pools():
    pool = torch.quartz.MemPool()
    with torch.quartz.use_mem_pool(pool):
        x = torch.ones(MIB, device="quartz")
    assert sum(block["total_size"] for block in pool.snapshot()) >= x.nbytes
    outside = torch.ones(MIB, device="quartz")
    pointers = [
        block["address"] <= outside.data_ptr() < block["address"] + block["total_size"] for block in pool.snapshot()
    ]
    assert pointers and not any(pointers)
    assert pool.id and pool.use_count() >= 1


@pytest.mark.cuda
def test_sync_debug_mode():
    x = torch.ones(2, device="quartz")
    torch.quartz.set_sync_debug_mode("error")
    try:
        assert torch.quartz.get_sync_debug_mode() == 2
        with pytest.raises(RuntimeError, match="synchronizing"):
            x.sum().item()
    finally:
        torch.quartz.set_sync_debug_mode(0)


@pytest.mark.cuda
def test_memory_fraction():
    assert 0 < torch.quartz.get_per_process_memory_fraction() <= 1


def test_old_names():
    assert torch.quartz.OutOfMemoryError is torch.OutOfMemoryError
    for old, new in (("memory_cached", "memory_reserved"), ("max_memory_cached", "max_memory_reserved")):
        with pytest.warns(FutureWarning, match=f"torch.quartz.{old} is an old name: use torch.quartz.{new}"):
            assert getattr(torch.quartz, old)(0) == getattr(torch.quartz, new)(0)
    for old in ("reset_max_memory_allocated", "reset_max_memory_cached"):
        kept = torch.empty(MIB, device="quartz")
        del kept
        with pytest.warns(FutureWarning, match=f"torch.quartz.{old} is an old name"):
            getattr(torch.quartz, old)()
        assert torch.quartz.max_memory_allocated() == torch.quartz.memory_allocated()


def test_zero_bytes():
    x = torch.empty(0, device="quartz")
    assert x.device.index == torch.quartz.current_device() and x.numel() == 0 and x.nbytes == 0
    assert torch.cat([x, x]).device.type == "quartz"


class TestSharedUnderTheNativeName:
    """While a native alias lives, neither side is resized: the other one would keep the old address."""

    @pytest.fixture(params=["native_alias", "adopt"])
    def pair(self, request):
        gc.collect()
        self.before = torch.quartz.memory_allocated()
        if request.param == "native_alias":
            x = torch.ones(100, device="quartz")
            return [x, torch.quartz.native_alias(x)]
        native = torch.ones(100, device=torch.quartz.native_device())
        return [torch.quartz.adopt(native), native]

    @pytest.mark.parametrize(
        "resize",
        [
            lambda x, native: native.resize_(50000),
            lambda x, native: native[3:].resize_(50000),
            lambda x, native: native.untyped_storage().resize_(0),
            lambda x, native: x.detach().resize_(50000),
            lambda x, native: x.untyped_storage().resize_(0),
            lambda x, native: torch.exp(torch.ones(500, device="quartz"), out=x[:0]),
        ],
        ids=["native", "view", "native storage", "quartz", "storage", "out"],
    )
    def test_resizing_either_is_refused(self, pair, resize):
        with pytest.raises(RuntimeError, match="not resizable"):
            resize(*pair)
        x, native = pair
        assert x.untyped_storage().data_ptr() == native.untyped_storage().data_ptr()
        assert x.tolist() == [1] * 100

    def test_with_the_alias_gone_it_is_resizable_again(self, pair):
        x = pair[0]
        pair.clear()  # drops the native one
        torch.exp(torch.zeros(500, device="quartz"), out=x.resize_(0))
        assert x.tolist() == [1] * 500
        x.resize_(50000)
        assert x[:500].tolist() == [1] * 500
        del x
        gc.collect()
        assert torch.quartz.memory_allocated() == self.before
