"""Outputs that obey a grammar: a JSON schema, a regular expression, a choice; and a request whose grammar is wrong.

python examples/08_structured_output.py
"""

import json

import torch_quartz as tq
from smollm2 import model_folder

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def main() -> None:
    """Serve constrained and free requests in one batch."""
    llm = tq.LLM(model_folder(), max_model_len=512, kv_cache_bytes=2**28)
    asked = {
        "Describe a person as JSON:": tq.StructuredOutputsParams(json=PERSON),
        "A date, as in 2024-05-17:": tq.StructuredOutputsParams(regex=r"\d{4}-\d{2}-\d{2}"),
        "Is the sky blue? Answer:": tq.StructuredOutputsParams(choice=["yes", "no"]),
        "The sea is": None,
        "A wrong schema:": tq.StructuredOutputsParams(json={"type": "no such type"}),
    }
    params = [
        tq.SamplingParams(temperature=0.0, max_tokens=40, structured_outputs=grammar) for grammar in asked.values()
    ]
    for output, prompt in zip(llm.generate(list(asked), params, use_tqdm=False), asked, strict=True):
        print(f"{prompt} {output.outputs[0].text!r}" if output.error is None else f"{prompt} refused: {output.error}")
        if asked[prompt] is not None and asked[prompt].json == PERSON:
            assert set(json.loads(output.outputs[0].text)) == {"name", "age"}


if __name__ == "__main__":
    main()
