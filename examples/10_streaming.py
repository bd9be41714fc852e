"""Texts as they come, for programs with an event loop: several streams at once, one of them given up half-way.

python examples/10_streaming.py
"""

import asyncio

import torch_quartz as tq
from smollm2 import model_folder

PROMPTS = ("The sea is", "My favourite animal is", "In the morning I")


async def stream(llm: tq.AsyncLLM, prompt: str, max_tokens: int = 24) -> str:
    """Print the pieces of one answer as they come."""
    params = tq.SamplingParams(temperature=0.7, seed=1, max_tokens=max_tokens, output_kind="delta")
    text = ""
    async for output in llm.generate(prompt, params):
        for sample in output.outputs:
            print(f"[{prompt}] {sample.text!r}")
            text += sample.text
    return text


async def main() -> None:
    """Run three streams; cancel a fourth, which gives its place and memory back at once."""
    async with tq.AsyncLLM(model_folder(), max_model_len=512, kv_cache_bytes=2**28) as llm:
        given_up = asyncio.create_task(stream(llm, "A very long story:", max_tokens=400))
        texts = await asyncio.gather(*(stream(llm, prompt) for prompt in PROMPTS[:2]))
        given_up.cancel()
        texts.append(await stream(llm, PROMPTS[2]))
        metrics = await llm.metrics()
        print(f"{len(texts)} finished, {metrics['aborted_requests']} aborted, {metrics['num_requests']} left")


if __name__ == "__main__":
    asyncio.run(main())
