"""Speculative decoding that changes nothing but the time: the same bytes with and without drafts.

The drafts are taken from the text itself (n-grams), which helps where a text repeats: code, tables, lists.

    python examples/09_speculation.py
"""

import sys
import time

import torch_quartz as tq
from smollm2 import model_folder

PROMPT = """def red(x):
    return paint(x, "red")

def green(x):
    return paint(x, "green")

def blue(x):
    return paint(x, "blue")

def yellow(x):
"""


def main() -> int:
    """Complete the prompt both ways; return 1 if the bytes differ."""
    samples = {}
    for name, speculative in (
        ("without drafts", None),
        ("with drafts", {"method": "ngram", "num_speculative_tokens": 5}),
    ):
        llm = tq.LLM(model_folder(), max_model_len=512, kv_cache_bytes=2**28, speculative=speculative)
        params = tq.SamplingParams(temperature=0.3, seed=7, max_tokens=64, logprobs=0)
        llm.generate([PROMPT], params, use_tqdm=False)  # loads code: neither side should pay for that
        llm.reset_prefix_cache()
        start = time.perf_counter()
        output = llm.generate([PROMPT], params, use_tqdm=False)[0]
        seconds = time.perf_counter() - start
        samples[name] = output.outputs[0]
        metrics = output.metrics
        print(
            f"{name}: {len(output.outputs[0].token_ids) / seconds:.1f} tokens/s, "
            f"{metrics.num_accepted_tokens} of {metrics.num_drafted_tokens} drafts accepted"
        )
    print(samples["with drafts"].text)
    same = samples["with drafts"] == samples["without drafts"]
    print("the same bytes" if same else "DIFFERENT")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
