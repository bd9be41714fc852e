"""``python -m torch_quartz generate|chat|bench`` on a tiny random model."""

import io
import json

import pytest
import torch
from model_zoo import build
from torch_quartz.__main__ import main
from words import word_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    build("llama", vocab_size=64).to(torch.bfloat16).save_pretrained(path)
    word_tokenizer().save_pretrained(path)
    return str(path)


OPTIONS = ["--max-model-len", "64", "--kv-cache-bytes", "4194304"]


def run(capsys, *arguments):
    status = main([*arguments, *OPTIONS])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_generate(folder, capsys):
    options = ["--prompt", "w3 w4", "--max-tokens", "5", "--temperature", "0"]
    status, out, _ = run(capsys, "generate", folder, *options)
    assert status == 0 and out.startswith("w3 w4") and len(out.splitlines()) == 1
    options += ["--prompt", "w5", "--json", "--speculative", '{"method": "ngram"}']
    status, out, _ = run(capsys, "generate", folder, *options)
    rows = [json.loads(line) for line in out.splitlines()]
    assert status == 0 and [row["prompt"] for row in rows] == ["w3 w4", "w5"]
    assert all(len(row["token_ids"]) <= 5 and row["error"] is None for row in rows)


def test_generate_from_stdin_with_a_bad_prompt(folder, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("w3\n\n" + "w4 " * 70 + "\n"))
    status, out, err = run(capsys, "generate", folder, "--max-tokens", "3")
    assert status == 1 and out.startswith("w3") and "max_model_len" in err


def test_chat(folder, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("w5\nw6\n/new\n" + "w7 " * 70 + "\nw8\n/quit\nnever\n"))
    status, out, err = run(capsys, "chat", folder, "--max-tokens", "4", "--system", "w2", "--seed", "1")
    assert status == 0 and len(out.splitlines()) == 3 and "max_model_len" in err


def test_bench(folder, capsys):
    status, out, _ = run(capsys, "bench", folder, "--num-prompts", "3", "--input-len", "9", "--output-len", "4")
    assert status == 0 and "generated_tokens_per_second" in out and "time_to_first_token_median" in out


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--top-p", "2"], "top_p"),
        (["--temperature", "nan"], "temperature"),
        (["--max-tokens", "0"], "max_tokens"),
        (["--device", "cpu"], "quartz"),
        (["--speculative", "[1]"], "speculative"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_a_sentence(folder, capsys, options, named):
    status, out, err = run(capsys, "generate", folder, "--prompt", "w3", *options)
    assert status == 2 and out == "" and named in err and "Traceback" not in err


def test_a_folder_that_does_not_exist(capsys):
    status, _, err = run(capsys, "generate", "/nowhere", "--prompt", "w3")
    assert status == 2 and "/nowhere" in err


def test_a_benchmark_needs_prompts(folder, capsys):
    with pytest.raises(SystemExit):
        run(capsys, "bench", folder, "--num-prompts", "0")
    assert "--num-prompts" in capsys.readouterr().err


def test_info_still_works(capsys):
    assert main(["info"]) == 0
    assert "torch-quartz" in capsys.readouterr().out
