"""What of a chat is supervised: exactly what the assistant wrote, in exactly the target's own tokens."""

import json

import data_kit as kit
import pytest
from data_kit import assistant, chat_tokenizer, tool_call, user

from hf_dflow.errors import DFlowError
from hf_dflow.training.templates import ChatTemplate, ChatTemplateError, chat_mode

TWO_TURNS = [
    {"role": "system", "content": "Be brief."},
    user("What is the capital of France?"),
    assistant("The capital is Paris."),
    user("And the weather?"),
    assistant("Sunny,\n  21 degrees."),
]
TOOL_TURNS = [
    user("What is the weather in Berlin?"),
    assistant("I will call the tool.", tool_calls=tool_call("Berlin"), reasoning_content="It wants the weather."),
    {"role": "tool", "content": "21"},
    assistant("It is 21 degrees.", reasoning_content="So 21."),
]


def encode(template, messages, eos="<|im_end|>", **options):
    """Supervised texts of each row, after checking the ids against the tokenizer's own `apply_chat_template`."""
    tokenizer = chat_tokenizer(template, eos)
    chat_template = ChatTemplate(tokenizer, {tokenizer.eos_token_id}, options)
    rows = chat_template.encode_answers(messages)
    ends = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    own = [tokenizer.apply_chat_template(messages[: i + 1], **options)["input_ids"] for i in ends]
    for row in rows:
        assert row.token_ids in own
    assert rows[-1].token_ids == own[-1]
    return [[tokenizer.decode(row.token_ids[start:end]) for start, end in row.spans] for row in rows]


@pytest.mark.parametrize("name", ["CHATML", "MARKED", "MARKED_WITHOUT_END", "MARKED_WITH_NEWLINE", "THINKING"])
def test_supervised_tokens_are_what_the_assistant_wrote_and_its_end_of_turn(name):
    """Bug: a role header, the user's words or the newline behind the end of turn are trained on, or the end is not."""
    expected = ["The capital is Paris.<|im_end|>", "Sunny,\n  21 degrees.<|im_end|>"]
    rows = encode(getattr(kit, name), TWO_TURNS)
    if name == "THINKING":  # it gives a last turn an empty thinking block, which nobody wrote
        assert rows == [expected[:1], expected[1:]]
    else:
        assert rows == [expected]


def test_the_three_kinds_of_marks_are_really_different():
    """Bug: the templates of this file agree, so the cases above show less than they say."""
    masks = []
    for name in ("MARKED", "MARKED_WITHOUT_END", "MARKED_WITH_NEWLINE"):
        options = {"return_assistant_tokens_mask": True, "return_dict": True}
        encoded = chat_tokenizer(getattr(kit, name)).apply_chat_template(TWO_TURNS, **options)
        masks.append((encoded["input_ids"], sum(encoded["assistant_masks"])))
    assert masks[0][0] == masks[1][0] == masks[2][0]
    assert masks[1][1] + 2 == masks[0][1] == masks[2][1] - 2


def test_the_templates_marks_decide():
    """Bug: a template's author marks the last turn only, and the others are trained on all the same."""
    assert encode(kit.MARKED_LAST, TWO_TURNS) == [["Sunny,\n  21 degrees.<|im_end|>"]]


def test_tool_calls_are_the_assistants_and_tool_results_are_not():
    """Bug: only the content field is looked for, so a drafter never learns to call a tool."""
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Berlin"}}</tool_call>'
    texts = [f"I will call the tool.{call}<|im_end|>", "It is 21 degrees.<|im_end|>"]
    assert encode(kit.CHATML, TOOL_TURNS) == [texts]
    thoughts = ["<think>It wants the weather.</think>", "<think>So 21.</think>"]
    for marked in (kit.MARKED, kit.MARKED_WITHOUT_END):
        assert encode(marked, TOOL_TURNS) == [[thought + text for thought, text in zip(thoughts, texts, strict=True)]]


def test_thinking_is_supervised_where_the_target_wrote_it():
    """Bug: thinking is cut off the answer, or a row shows thinking that the target had no longer seen."""
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Berlin"}}</tool_call>'
    first = f"<think>\nIt wants the weather.\n</think>\n\nI will call the tool.{call}<|im_end|>"
    second = "<think>\nSo 21.\n</think>\n\nIt is 21 degrees.<|im_end|>"
    assert encode(kit.THINKING, TOOL_TURNS) == [[first, second]]
    # As soon as the user speaks again the template drops what was thought: what was written then has its own row.
    third = "<think>\nPolite.\n</think>\n\nWelcome.<|im_end|>"
    more = [*TOOL_TURNS, user("Thanks."), assistant("Welcome.", reasoning_content="Polite.")]
    assert encode(kit.THINKING, more) == [[first, second], [third]]


def test_rows_begin_as_serving_begins():
    """Bug: the prompt before a supervised turn is not what the target is served before it writes that turn."""
    for template, options in ((kit.CHATML, {}), (kit.THINKING, {}), (kit.THINKING, {"enable_thinking": False})):
        chats = [TWO_TURNS] if options else [TWO_TURNS, TOOL_TURNS]
        tokenizer = chat_tokenizer(template)
        chat_template = ChatTemplate(tokenizer, {tokenizer.eos_token_id}, options)
        for messages in chats:
            row = chat_template.encode_answers(messages)[-1]
            start, _ = row.spans[-1]
            served = chat_template.encode_prompt(messages[:-1])
            block = tokenizer("<think>\n\n</think>\n\n", add_special_tokens=False)["input_ids"]
            is_given_a_block = template == kit.THINKING and not options and messages is TWO_TURNS
            assert row.token_ids[:start] == served + (block if is_given_a_block else [])


def test_thinking_in_a_chat_but_switched_off_is_refused():
    """Bug: the answer is supervised behind a prompt that never precedes it."""
    with pytest.raises(ChatTemplateError, match="generation prompt"):
        encode(kit.THINKING, TOOL_TURNS, enable_thinking=False)


def test_templates_without_generation_prompt_or_end_of_turn():
    """Bug: the role header is trained on, a leading blank goes missing, or the span runs into the next turn."""
    chat = TWO_TURNS[1:]
    spaced = [" The capital is Paris. </s>", " Sunny,\n  21 degrees. </s>"]
    assert encode(kit.INST, chat, "</s>") == [spaced]
    expected = ["The capital is Paris.<|im_end|>", "Sunny,\n  21 degrees.<|im_end|>"]
    assert encode(kit.HEADED, chat) == [expected]
    assert encode(kit.ENDLESS, chat) == [[" The capital is Paris.", " Sunny,\n  21 degrees."]]


def test_a_turn_that_does_not_begin_with_its_content_needs_a_template_without_headers():
    """Bug: a call without generation prompt is refused, or a role header is taken for what the assistant wrote."""
    chat = [user("hello"), assistant("", tool_calls=tool_call("Berlin"))]
    call = '[CALLS]{"name": "weather", "arguments": {"city": "Berlin"}}</s>'
    assert encode(kit.INST, chat, "</s>") == [[call]]
    thought = [user("hello"), assistant("hi", reasoning_content="Polite.")]
    assert encode(kit.THINKING, thought) == [["<think>\nPolite.\n</think>\n\nhi<|im_end|>"]]
    with pytest.raises(ChatTemplateError, match="generation prompt"):
        encode(kit.THINKING_UNASKED, thought)


def test_a_generation_prompt_that_no_turn_shows_is_not_supervised():
    """Bug: a common first character of prompt and answer ("<") is taken for part of the prompt."""
    chat = [user("hello"), assistant("<b>hello</b>")]
    assert encode(kit.OPENED, chat, "</s>") == [["<b>hello</b></s>"]]


def test_a_chat_may_begin_with_the_assistant_and_end_with_the_user():
    """Bug: the first turn has no prompt to render, or a last question is rendered behind the last answer."""
    chat = [assistant("hello"), user("What is the weather?"), assistant("Sunny."), user("Thanks")]
    for template in (kit.CHATML, kit.MARKED):
        assert encode(template, chat) == [["hello<|im_end|>", "Sunny.<|im_end|>"]]


def test_a_token_shared_with_the_template_is_refused():
    """Bug: the boundary falls inside a token, so text and prompt are both wrong by some characters."""
    glued = kit.ENDLESS.replace("'assistant:'", "'assistant:T'").replace("': ' +", "':T' +")
    tokenizer = chat_tokenizer(glued)
    assert len(tokenizer("The")["input_ids"]) == 1
    template = ChatTemplate(tokenizer, {tokenizer.eos_token_id})
    with pytest.raises(ChatTemplateError, match="share a token"):
        template.encode_answers([user("x"), assistant("he")])
    assert template.encode_answers([user("x"), assistant("wo")])


def test_what_cannot_work_is_refused_in_words():
    """Bug: a dataset trains on nothing, or a misspelt option silently changes nothing."""
    tokenizer = chat_tokenizer(kit.CHATML)
    with pytest.raises(DFlowError, match="never reads enable_thinking"):
        ChatTemplate(tokenizer, {2}, {"enable_thinking": False})
    with pytest.raises(DFlowError, match="--plain"):
        ChatTemplate(chat_tokenizer(None), {2})
    template = ChatTemplate(tokenizer, {2})
    with pytest.raises(ChatTemplateError, match="no assistant turn"):
        template.encode_answers([user("hello")])
    silent = ChatTemplate(chat_tokenizer("{% for m in messages %}{{ m.role }}{% endfor %}"), {2})
    with pytest.raises(ChatTemplateError, match="does not render"):
        silent.encode_answers([user("hello"), assistant("x")])
    strict = ChatTemplate(chat_tokenizer("{{ raise_exception('only users') }}"), {2})
    with pytest.raises(ChatTemplateError, match="only users"):
        strict.encode_answers([user("hello"), assistant("x")])


def test_the_description_tells_templates_and_options_apart():
    """Bug: a run goes on with another template or with thinking switched on in between."""
    tokenizer = chat_tokenizer(kit.THINKING)
    described = [
        ChatTemplate(tokenizer, {2}).describe(),
        ChatTemplate(tokenizer, {2}, {"enable_thinking": False}).describe(),
        ChatTemplate(chat_tokenizer(kit.CHATML), {2}).describe(),
        ChatTemplate(tokenizer, {0, 2}).describe(),
        ChatTemplate(tokenizer, {2}, is_plain=True).describe(),
    ]
    assert all(a != b for i, a in enumerate(described) for b in described[:i])


# -- the mode of a template and its options

# A template that thinks unless told otherwise, under the other name that the switch has.
OFF_BY_DEFAULT = kit.CHATML + "{% if add_generation_prompt and not thinking %}{{ '<think></think>' }}{% endif %}"
MENTIONS_THE_WORD = kit.CHATML + "{% if false %}{{ m.thinking }}{% endif %}"
MODES = {
    "no switch": (kit.CHATML, {}, "chat"),
    "on by default": (kit.THINKING, {}, "thinking"),
    "switched on": (kit.THINKING, {"enable_thinking": True}, "thinking"),
    "switched off": (kit.THINKING, {"enable_thinking": False}, "non-thinking"),
    "off by default, by another name": (OFF_BY_DEFAULT, {}, "non-thinking"),
    "on, by another name": (OFF_BY_DEFAULT, {"thinking": True}, "thinking"),
    "a word that is no switch": (MENTIONS_THE_WORD, {}, "chat"),
    "a template that refuses the question": ("{{ raise_exception('no') }}{{ thinking }}", {}, None),
}


@pytest.mark.parametrize("case", MODES)
def test_the_mode_of_a_template_and_its_options(case):
    """Bug: a thinking model's data called "chat" because nobody gave the option, or a switch taken for its opposite."""
    template, options, mode = MODES[case]
    tokenizer = chat_tokenizer(template)
    described = json.loads(json.dumps(ChatTemplate(tokenizer, {2}, options).describe()))
    assert chat_mode(described, tokenizer) == mode
    if not options:
        others = [None, chat_tokenizer(None), chat_tokenizer(template + " ")]
        assert [chat_mode(described, other) for other in others] == [None] * 3
