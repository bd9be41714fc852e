"""Many prompts through the engine in one call, no GPU needed: the text of a prompt does not depend on the others.

python examples/04_offline.py
python examples/04_offline.py --prompt "Once upon a time" --temperature 0.8 --seed 7 --max-tokens 60
"""

import argparse
import sys

import torch_quartz as tq
from smollm2 import model_folder

PROMPTS = (
    "The capital of France is",
    "Water boils at",
    "def fibonacci(n):",
    "The three primary colours are",
    "Once upon a time, in a small village by the sea,",
    "The opposite of hot is",
)


def main() -> int:
    """Complete the prompts together and the first one alone; return 1 if that made a difference."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompt", action="append", help="instead of the built-in ones; may be repeated")
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    llm = tq.LLM(model_folder(), max_model_len=512, kv_cache_bytes=2**28)
    params = tq.SamplingParams(
        temperature=arguments.temperature, seed=arguments.seed, max_tokens=arguments.max_tokens, logprobs=0
    )
    prompts = arguments.prompt or list(PROMPTS)
    together = llm.generate(prompts, params)
    for output in together:
        if output.error:
            print(f"{output.prompt!r}: {output.error}")
            continue
        sample = output.outputs[0]
        print(f"{output.prompt!r} -> {sample.text!r} ({sample.finish_reason})")

    alone = llm.generate(prompts[:1], params, use_tqdm=False)[0].outputs[0]
    same = alone == together[0].outputs[0]  # tokens, text and every bit of the log probabilities
    metrics = llm.metrics()
    print(
        f"alone and among {len(prompts)}: {'the same bits' if same else 'DIFFERENT'}; "
        f"{metrics['generated_tokens']} tokens at {metrics['generated_tokens_per_second']:.1f} tokens/s"
    )
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
