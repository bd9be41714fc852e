"""The part of the conformance sweep that CI runs: every entry of PyTorch's databases with one dtype and two samples."""

import json
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parent / "conformance.py"
# Entries of each database with at least one variant that plain PyTorch passes, torch 2.11 to 2.14. A lower number means
# that the harness lost variants, which must not look like success.
LEAST_ENTRIES = {"op_db": 680, "foreach_db": 48, "nested_db": 150, "module_db": 110, "optim_db": 14}


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """The finished sweep: (exit status, what it printed, summary)."""
    folder = tmp_path_factory.mktemp("conformance")
    command = [sys.executable, str(SCRIPT), "--profile", "slice", "--jobs", "1", "--out", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    document = json.loads((folder / "conformance.json").read_text())
    print(done.stdout)
    return done, document


def test_nothing_fails(outcome):
    done, _ = outcome
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-5000:]


@pytest.mark.parametrize("database", LEAST_ENTRIES)
def test_every_entry_is_covered(outcome, database):
    _, document = outcome
    entries = document["summary"]["entries"][database]
    results = [result for result in document["results"] if result["database"] == database]
    excluded = {result["name"] for result in results if result["status"] == "skipped"}
    assert entries["all pass"] >= LEAST_ENTRIES[database]
    assert entries["all pass"] == entries["of"] - len(excluded)


def test_nothing_is_skipped_without_a_cause(outcome):
    _, document = outcome
    for result in document["results"]:
        assert result["status"] != "skipped" or len(result["message"]) > 20


def test_the_fallback_did_the_work(outcome):
    _, document = outcome
    calls = sum(checks.get("fallback", 0) for checks in document["summary"]["checks"]["op_db"].values())
    assert calls > 10000
