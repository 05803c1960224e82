"""Chat templates of the kinds that exist, a tokenizer for them, and a tiny target in a folder."""

from functools import cache
from pathlib import Path

from kit import tiny_target
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<|end|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>")
STOPS = [2, *range(110, 150)]  # <|im_end|>, and bytes that no English text has: a random target rarely says one token
TEXT = (
    "The capital of France is Paris. What is the weather in Berlin? assistant user system tool thinking",
    "I will call the tool and then tell you. Sunny, 21 degrees. User: hello Assistant: hello [INST] [/INST]",
)

CALL = "{% if m.tool_calls %}{{ '<tool_call>' + m.tool_calls[0].function | tojson + '</tool_call>' }}{% endif %}"
ASKED = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
HEADED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    + CALL
    + "{{ '<|im_end|>\n' }}{% endfor %}"
)
CHATML = HEADED + ASKED


def _marked(turn: str) -> str:
    return (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
        + turn
        + "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        + ASKED
    )


# What is marked differs in the wild: with the end-of-turn token, without it, or with the newline behind it.
WRITTEN = (
    "{% if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}{{ m.content }}" + CALL
)
MARKED = _marked("{% generation %}" + WRITTEN + "{{ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}")
MARKED_WITHOUT_END = _marked("{% generation %}" + WRITTEN + "{% endgeneration %}{{ '<|im_end|>\n' }}")
MARKED_WITH_NEWLINE = _marked("{% generation %}" + WRITTEN + "{{ '<|im_end|>\n' }}{% endgeneration %}")
MARKED_LAST = MARKED.replace("{% if m.role == 'assistant' %}", "{% if m.role == 'assistant' and loop.last %}")

# Thinking is dropped once the user speaks again, the last turn gets a block even if it is empty.
THINKING = """{%- set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}
{%- set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' %}{% set thought = m.reasoning_content or '' %}
{%- if loop.index0 > ns.last and (loop.last or thought) %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}
{%- endif %}{{ m.content }}{% if m.tool_calls %}<tool_call>{{ m.tool_calls[0].function | tojson }}</tool_call>
{%- endif %}{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"""

THINKING_UNASKED = THINKING.split("{% if add_generation_prompt %}")[0]

# The generation prompt opens the thinking block, which no rendered turn has (DeepSeek-R1).
OPENED = """{% for m in messages %}{% if m.role == 'user' %}{{ '<User>' + m.content }}{% else %}{{ '<Assistant>' +
m.content.split('</think>')[-1] + '</s>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<Assistant><think>\n' }}{% endif %}"""

# No generation prompt (Llama 2, and HEADED above), and no end-of-turn token (a base model's plain dialogue).
INST = """{% for m in messages %}{% if m.role == 'user' %}{{ '<s>[INST] ' + m.content + ' [/INST]' }}{% else %}
{%- if m.tool_calls %}{{ '[CALLS]' + m.tool_calls[0].function | tojson }}{% else %}{{ ' ' + m.content + ' ' }}
{%- endif %}{{ '</s>' }}{% endif %}{% endfor %}"""
ENDLESS = """{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"""


@cache
def _trained() -> str:
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(TEXT, trainer)
    return model.to_str()


def chat_tokenizer(template: str | None, eos_token: str = "<|im_end|>") -> PreTrainedTokenizerFast:
    """Byte-level, some merges, so that every text comes back from its tokens."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained()), eos_token=eos_token, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = template
    return tokenizer


def chat_target(folder: Path, template: str | None = CHATML, **overrides) -> Path:
    """A folder with a tiny Llama and its tokenizer; about every tenth token that it writes ends its turn."""
    tokenizer = chat_tokenizer(template)
    target = tiny_target("llama", attention="sdpa", vocab_size=len(tokenizer), eos_token_id=2, **overrides).float()
    target.generation_config.eos_token_id = STOPS
    target.generation_config.repetition_penalty = 1.3  # recommended settings are no part of the target
    target.generation_config.do_sample = True
    target.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def user(content: str) -> dict:
    return {"role": "user", "content": content}


def assistant(content: str, **fields) -> dict:
    return {"role": "assistant", "content": content, **fields}


def tool_call(city: str) -> list[dict]:
    return [{"type": "function", "function": {"name": "weather", "arguments": {"city": city}}}]
