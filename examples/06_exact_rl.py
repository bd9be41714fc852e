"""Reinforcement learning whose sampler and trainer agree bit for bit: every importance ratio is exactly 1.

The engine draws answers and reports the log probability of each token; the trainer scores the same answers with an
ordinary forward pass of the same model, with gradients. On other stacks the two numbers differ (other kernels, other
batches), and the ratio ``exp(trainer - sampler)`` is off from 1 before anything has been learned, which is what
clipping and importance correction must then repair. Here both are the same bytes, whatever was batched or cached.

One step of REINFORCE with a baseline follows, then the check again with the new weights.

    python examples/06_exact_rl.py
    python examples/06_exact_rl.py --steps 3 --samples 8
"""

import argparse
import sys

import torch
import torch_quartz as tq
from smollm2 import model_folder
from torch_quartz.ops import token_logprobs
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS = (
    "Write one short sentence about the sea.",
    "Name an animal.",
    "What do you like about the morning?",
)


def reward(text: str) -> float:
    """Return how much of a text is vowels: something simple that a model can move."""
    letters = [letter for letter in text.lower() if letter.isalpha()]
    return sum(letter in "aeiou" for letter in letters) / max(len(letters), 1)


def score(model: torch.nn.Module, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Return the log probability of each token of an answer, from a plain forward pass."""
    ids = torch.tensor([prompt + answer], device="quartz")
    logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return token_logprobs(logits, ids[0, len(prompt) :])


def sampled(sample: tq.CompletionOutput) -> torch.Tensor:
    """Return what the engine reported for the tokens of a sample."""
    return torch.tensor(
        [entry[token].logprob for token, entry in zip(sample.token_ids, sample.logprobs, strict=True)],
        dtype=torch.float32,
        device="quartz",
    )


def main() -> int:
    """Train for some steps; return 1 if a ratio was not exactly 1."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--samples", type=int, default=4, help="answers to each prompt")
    parser.add_argument("--max-tokens", type=int, default=16)
    arguments = parser.parse_args()

    folder = model_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map="quartz").eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    llm = tq.LLM(model, tokenizer=tokenizer, max_model_len=256, kv_cache_bytes=2**27)

    exact = True
    for step in range(arguments.steps + 1):
        params = tq.SamplingParams(
            n=arguments.samples, temperature=1.0, seed=step, max_tokens=arguments.max_tokens, logprobs=0
        )
        outputs = llm.generate(list(PROMPTS), params, use_tqdm=False)
        rewards = torch.tensor([[reward(sample.text) for sample in output.outputs] for output in outputs])
        equal = tokens = 0
        for output, row in zip(outputs, rewards, strict=True):
            for sample, advantage in zip(output.outputs, row - row.mean(), strict=True):
                trainer, sampler = score(model, output.prompt_token_ids, sample.token_ids), sampled(sample)
                ratio = torch.exp(trainer - sampler)
                equal += int((ratio == 1).sum())
                tokens += len(sample.token_ids)
                if step < arguments.steps:
                    (-(ratio * float(advantage)).sum() / rewards.numel()).backward()
        print(f"step {step}: mean reward {rewards.mean():.3f}, ratio exactly 1 for {equal} of {tokens} tokens")
        exact &= equal == tokens
        if step < arguments.steps:
            optimizer.step()
            optimizer.zero_grad()
            llm.reset_prefix_cache()  # keys and values of the old weights
    print("sampler and trainer agree bit for bit" if exact else "sampler and trainer DIFFER")
    return 0 if exact else 1


if __name__ == "__main__":
    sys.exit(main())
