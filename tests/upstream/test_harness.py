"""The harness notices what goes wrong: without these tests a sweep that passes would prove nothing."""

import json
import pathlib
import signal
import subprocess
import sys
import time

import pytest
import torch

UPSTREAM = pathlib.Path(__file__).parent
sys.path.insert(0, str(UPSTREAM))

from harness import exclusions, report  # noqa: E402
from harness.comparison import Rules, compare  # noqa: E402
from harness.placement import Placer  # noqa: E402
from harness.records import Outcome, alias_facts, record, values  # noqa: E402
from harness.run import pick  # noqa: E402


@pytest.fixture(scope="module")
def selftest(tmp_path_factory):
    """One sweep over the database of misbehaviours, with plain PyTorch on both sides."""
    folder = tmp_path_factory.mktemp("selftest")
    command = [sys.executable, str(UPSTREAM / "conformance.py"), "--substrate", "host", "--control"]
    command += ["--databases", "selftest", "--patience", "30", "--out", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    document = json.loads((folder / "conformance.json").read_text())
    return done, {result["name"]: result for result in document["results"]}, folder


@pytest.mark.parametrize(
    ("name", "status", "message"),
    [
        ("right", "passed", ""),
        ("last_bit", "failed", "close, but not bit-equal"),
        ("sign_of_zero", "failed", "close, but not bit-equal"),
        ("value", "failed", "not close"),
        ("stride", "failed", "stride is (2, 1), expected (1, 2)"),
        ("copy_instead_of_view", "failed", "aliases is []"),
        ("place", "failed", "place is meta, expected device"),
        ("raises", "error", "ValueError: on purpose"),
        ("reference_raises", "no_reference", "on purpose"),
        ("crash", "crash", "exit status -6"),
        ("reference_crash", "no_reference", "exit status -6"),
        ("hang", "hang", "in hang"),  # the traceback names the function
        ("right_again", "passed", ""),
    ],
)
def test_misbehaviour_is_counted(selftest, name, status, message):
    _, results, _ = selftest
    assert results[name]["status"] == status
    assert message in results[name].get("message", "")


def test_counts_and_exit_status(selftest):
    done, _, folder = selftest
    assert done.returncode == 1, done.stdout + done.stderr
    assert "2 passed, 6 failed, 1 error, 1 crash, 1 hang, 0 skipped, 2 no reference" in done.stdout, done.stdout
    table = (folder / "conformance.md").read_text()
    assert "| call | 2 | 6 | 1 | 1 | 1 | 0 | 2 |" in table
    assert "| crash | float32 | call | crash |" in table


def test_deadline_counts_as_skipped(tmp_path):
    command = [sys.executable, str(UPSTREAM / "conformance.py"), "--substrate", "host", "--control"]
    command += ["--databases", "selftest", "--ops", "right", "--deadline", "0.000001", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert "0 passed, 0 failed, 0 error, 0 crash, 0 hang, 2 skipped, 0 no reference" in done.stdout, done.stdout


def test_interrupt_keeps_what_is_done(tmp_path):
    command = [sys.executable, str(UPSTREAM / "conformance.py"), "--substrate", "host", "--control"]
    command += ["--databases", "selftest", "--ops", "^(right|hang|right_again)$", "--out", str(tmp_path)]
    process = subprocess.Popen([*command, "--patience", "3000"], stdout=subprocess.PIPE, text=True)
    time.sleep(60)  # by now the second variant hangs; if not, less is done and the counts below still hold
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=300)
    document = json.loads((tmp_path / "conformance.json").read_text())
    statuses = {result["name"]: result["status"] for result in document["results"]}
    assert statuses.keys() == {"right", "hang", "right_again"}, printed
    assert statuses["hang"] == statuses["right_again"] == "skipped", printed


def test_slices_cover_everything_once_and_merge(tmp_path):
    folders = []
    for number in (1, 2):
        folders.append(str(tmp_path / f"part{number}"))
        command = [sys.executable, str(UPSTREAM / "conformance.py"), "--substrate", "host", "--control"]
        command += ["--databases", "op_db", "--ops", "^(neg|sin)$", "--checks", "forward"]
        command += ["--dtypes", "float32,float64"]
        subprocess.run([*command, "--slice", f"{number}/2", "--out", folders[-1]], check=True, timeout=1200)
    meta, results = report.merge([pathlib.Path(folder) for folder in folders])
    assert sorted((r["name"], r["dtype"]) for r in results) == [
        ("neg", "float32"),
        ("neg", "float64"),
        ("sin", "float32"),
        ("sin", "float64"),
    ]
    assert report.tally(results)["entries"]["op_db"] == {"all pass": 2, "of": 2}
    assert meta["substrate"].startswith("host")
    _, again = report.merge([pathlib.Path(folder) for folder in (*folders, folders[0])])
    assert len(again) == len(results)
    page = tmp_path / "page.md"
    page.write_text("# Results\n")
    for _ in range(2):  # a second update replaces the section
        report.update_document(page, meta, results)
    text = page.read_text()
    assert text.startswith("# Results\n") and text.count("<!-- sweep: ") == text.count("| forward | 4 | 0 |") == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex32, torch.bool, torch.float8_e5m2])
def test_record_keeps_the_elements(dtype):
    tensor = torch.tensor([[1, 0], [0, 1]], dtype=torch.float32).to(dtype).t()
    again = values(record(tensor, "cpu"))
    assert again.dtype == dtype and torch.equal(again.to(torch.complex64), tensor.to(torch.complex64))


def test_record_describes_sparse_and_lazy_tensors():
    dense = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    for sparse in (dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse_bsr((1, 1))):
        assert values(record(sparse, "cpu").parts[-1]).flatten().tolist() == [2.0, 3.0]
    conjugated = torch.tensor([1 + 2j]).conj()
    assert record(conjugated, "cpu").bits == (True, False, False)
    assert values(record(conjugated, "cpu")).tolist() == [1 - 2j]


def test_nan_payload_is_not_a_difference_but_its_place_is():
    nan = torch.tensor([float("nan"), 1.0])
    other = nan.clone().view(torch.int32).bitwise_xor(torch.tensor([1, 0], dtype=torch.int32)).view(torch.float32)
    moved = nan.flip(0)

    def judge(got):
        sides = [Outcome("call", tensors={"x": record(t, "cpu")}) for t in (nan, got)]
        return compare([sides[0]], [sides[1]], Rules(bit_equal=True))

    assert judge(other).status == "passed" and judge(other).bit_equal == 1
    assert judge(moved).status == "failed"


def test_exception_types_are_compared():
    reference = [Outcome("a", error=("ValueError", "x")), Outcome("b")]
    same = [Outcome("a", error=("ValueError", "other words")), Outcome("b", error=("RuntimeError", "y"))]
    other = [Outcome("a", error=("RuntimeError", "x")), Outcome("b")]
    silent = [Outcome("a"), Outcome("b")]
    verdicts = [compare(reference, got, Rules(bit_equal=True), errors=True) for got in (same, other, silent)]
    assert [verdict.status for verdict in verdicts] == ["passed", "failed", "failed"]
    assert verdicts[0].without_reference == 1


def test_random_numbers_are_compared_by_kind():
    def verdict(expected, got):
        pair = [Outcome("a", tensors={"output": record(x, "cpu")}) for x in (expected, got)]
        return compare([pair[0]], [pair[1]], Rules(bit_equal=True, random=True)).status

    uniform = torch.arange(1, 33) / 33
    assert verdict(uniform, uniform.flip(0)) == "passed"
    assert verdict(uniform, -uniform) == "failed"
    assert verdict(uniform.round(), uniform) == "failed" and verdict(uniform, uniform.log() / 0) == "failed"
    assert verdict(uniform, uniform.double()) == "failed" and verdict(uniform, uniform[:31]) == "failed"
    assert verdict(uniform[:4], -uniform[:4]) == "passed"  # too few to tell


def test_missing_and_extra_results_are_failures():
    one, two = [Outcome("a")], [Outcome("a"), Outcome("b")]
    assert compare(two, one, Rules(bit_equal=True)).status == "failed"
    assert compare(one, two, Rules(bit_equal=True)).status == "failed"


def test_placer_keeps_structure():
    base = torch.arange(12.0)
    args = (base[2:8], base.view(3, 4).t(), base[2:8], torch.tensor([1j, 2]).conj(), torch.empty(0, 3))
    args = (*args, torch.ones(2, requires_grad=True))
    copies = Placer("cpu", "cpu", grad=True).place(args)
    assert copies[0].untyped_storage().data_ptr() == copies[1].untyped_storage().data_ptr() != base.data_ptr()
    assert copies[1].stride() == (1, 4) and copies[0].storage_offset() == 2
    assert torch.equal(copies[1], args[1]) and copies[3].is_conj() and torch.equal(copies[3], args[3])
    repeated = Placer("cpu", "cpu", grad=False).place((args[5], args[5]))
    assert repeated[0] is repeated[1] and not repeated[0].requires_grad and copies[5].requires_grad


def test_alias_facts():
    x = torch.arange(6.0)
    assert alias_facts((x,), [x, x[2:], x.clone()]) == [(0, "same", "input", 0), (1, "shares", "input", 0, 2, True)]


def test_pick_is_spread_and_complete():
    assert [number for number, _ in pick(range(100), 6)] == [0, 1, 2, 4, 8, 16]
    assert [number for number, _ in pick(range(5), 6)] == [0, 1, 2, 3, 4]
    assert [number for number, _ in pick(range(3), 2)] == [0, 1]


def test_expecttest_stand_in_is_enough():
    """PyTorch's databases load where expecttest is missing."""
    code = (
        "import sys, importlib.util\n"
        f"sys.path[:] = [{str(UPSTREAM)!r}] + sys.path\n"
        "real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *a: None if name == 'expecttest' else real(name, *a)\n"
        "from harness.target import provide_expecttest\n"
        "provide_expecttest()\n"
        "sys.path.insert(0, sys.path[-1])\n"
        "import expecttest\n"
        "assert 'standins' in expecttest.__file__, expecttest.__file__\n"
        "from harness.databases import entries\n"
        "assert len(entries('op_db')) > 600 and len(entries('module_db')) > 100 and len(entries('optim_db')) > 10\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_every_exclusion_has_a_cause():
    names = ("EXCLUDED", "EXCLUDED_ON_CUDA", "CLOSE_ON_HOST", "OWN_ORDER", "RANDOM")
    for name in names:
        assert all(len(cause) > 20 for cause in getattr(exclusions, name).values()), name
