"""Conversations through the model's chat template: several at a time, and a tool that the model may call.

python examples/07_chat.py
python -m torch_quartz chat "$(python examples/smollm2.py)"      # and one in the terminal
"""

import torch_quartz as tq
from smollm2 import model_folder

SYSTEM = {"role": "system", "content": "Answer in one short sentence."}
QUESTIONS = ("What is the capital of Italy?", "What is the largest planet?", "Who wrote Hamlet?")
# SmolLM2's template does not know tools; this one shows where they come in.
TOOL_TEMPLATE = """\
<|im_start|>system
You can call: {% for tool in tools %}{{ tool.function.name }}({{ tool.function.parameters.properties | join(', ') }})\
{% endfor %}<|im_end|>
{% for message in messages %}<|im_start|>{{ message.role }}
{% for call in message.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}\
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "day": {"type": "string"}}},
    },
}


def main() -> None:
    """Ask three questions at once, go on with one of them, and show a prompt with a tool."""
    llm = tq.LLM(model_folder(), max_model_len=512, kv_cache_bytes=2**28)
    params = tq.SamplingParams(temperature=0.0, max_tokens=24)
    conversations = [[SYSTEM, {"role": "user", "content": question}] for question in QUESTIONS]
    for question, output in zip(QUESTIONS, llm.chat(conversations, params, use_tqdm=False), strict=True):
        print(f"{question} -> {output.outputs[0].text.strip()}")

    first = conversations[0]
    first.append({"role": "assistant", "content": "The capital of Italy is Rome."})
    first.append({"role": "user", "content": "And of Spain?"})
    output = llm.chat(first, params, use_tqdm=False)[0]
    print(
        f"And of Spain? -> {output.outputs[0].text.strip()} ({output.num_cached_tokens} tokens from the prefix cache)"
    )

    # Arguments may be the JSON text that an API delivered: the template gets the mapping.
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    turns = [
        {"role": "user", "content": "How is the weather in Rome?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "sunny, 24 degrees"},
    ]
    output = llm.chat(turns, params, tools=[WEATHER], chat_template=TOOL_TEMPLATE, use_tqdm=False)[0]
    print(f"with a tool -> {output.outputs[0].text.strip()}")


if __name__ == "__main__":
    main()
