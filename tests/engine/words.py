"""A tokenizer whose words are ``w2`` to ``w63``: their numbers are the ids. With a chat template."""

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    "{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('no such role') }}{% endif %}"
    "{% for call in m.tool_calls or [] %}{% for name in call.function.arguments %}{{ name }} {% endfor %}{% endfor %}"
    "{{ m.content }} {% endfor %}{% if add_generation_prompt %}w63{% endif %}"
)


def word_tokenizer(template=TEMPLATE):
    words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, 64)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.chat_template = template
    return fast
