"""Chats as token ids in the target's own template, and which of the tokens the assistant wrote."""

import hashlib
import re
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_dflow.errors import DFlowError

Message = dict[str, Any]
Span = tuple[int, int]
MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
PLACEHOLDER = "hfdflowplaceholder"  # plain letters: no template trims, escapes or parses them
THINKING_SWITCHES = ("enable_thinking", "thinking")  # names that templates give to the same option


class ChatTemplateError(DFlowError, ValueError):
    """The template cannot render a chat, or the assistant's text cannot be separated from the template's."""


@dataclass(frozen=True)
class EncodedChat:
    """A rendered chat and the half-open token spans that the assistant wrote, end-of-turn tokens included."""

    token_ids: list[int]
    spans: tuple[Span, ...]


class ChatTemplate:
    """The target's own chat template with its options.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The target's.
        eos_ids (`set[int]`): Tokens at which the target stops.
        options (`dict`, *optional*): Keyword arguments of the template, such as `enable_thinking`.
        is_plain (`bool`, *optional*, defaults to `False`): No template: the target continues the prompt's text.

    Raises:
        DFlowError: The tokenizer has no chat template, or the template never reads one of the options.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        eos_ids: set[int],
        options: dict[str, Any] | None = None,
        is_plain: bool = False,
    ):
        self.tokenizer, self.eos_ids, self.options, self.is_plain = tokenizer, eos_ids, options or {}, is_plain
        if is_plain:
            self.source = ""
            if self.options:
                raise DFlowError("template options need a chat template; leave out either them or --plain")
            return
        templates = tokenizer.chat_template
        if not templates:
            raise DFlowError(
                "the tokenizer has no chat template; use one that has one, or continue the prompts' text with --plain"
            )
        # A tokenizer may hold several named templates and choose one of them when a chat has tools.
        self.source = (
            templates if isinstance(templates, str) else "\n".join(templates[key] for key in sorted(templates))
        )
        unread = [name for name in self.options if not re.search(rf"\b{re.escape(name)}\b", self.source)]
        if unread:
            raise DFlowError(f"the target's chat template never reads {', '.join(unread)}; leave such options out")

    def describe(self) -> dict[str, Any]:
        """The part of a data file's header that identifies template and options."""
        digest = None if self.is_plain else hashlib.sha256(self.source.encode()).hexdigest()
        return {"sha256": digest, "options": self.options, "eos_token_ids": sorted(self.eos_ids)}

    def encode_prompt(self, messages: list[Message], tools: list | None = None) -> list[int]:
        """Token ids of a chat up to where the assistant starts writing.

        Raises:
            ChatTemplateError: The template refuses the chat.
        """
        if self.is_plain:
            if len(messages) != 1:
                raise ChatTemplateError("a chat of several messages needs a chat template")
            return list(self.tokenizer(messages[0]["content"])["input_ids"])
        return self._encode(messages, tools, add_generation_prompt=True)["input_ids"]

    def encode_answers(self, messages: list[Message], tools: list | None = None) -> list[EncodedChat]:
        """Token ids of a chat that already holds assistant turns, supervised where the assistant wrote.

        If the template marks what the assistant writes (`{% generation %}`), its marks decide. Otherwise each turn is
        rendered as it was served: what follows the generation prompt, up to the end-of-turn token. Messages after the
        last assistant turn are left out.

        Returns:
            `list[EncodedChat]`: One, or more if a later rendering changes an earlier turn, as templates do that drop
            the thinking of past turns: such a turn gets a row of its own, the chat up to it. `token_ids` are always
            those of `apply_chat_template` on the chat up to the row's last turn.

        Raises:
            ChatTemplateError: The template refuses the chat, or the assistant's tokens cannot be separated.
        """
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            raise ChatTemplateError("the chat has no assistant turn")
        if self.is_plain:
            raise ChatTemplateError("answers that chats already hold need a chat template")
        if MARKER.search(self.source) and self.tokenizer.is_fast:  # slow tokenizers have no character offsets
            marked = self._marked(messages[: turns[-1] + 1], tools)
            if marked.spans:
                return [marked]
        rows: list[tuple[list[int], list[Span]]] = []
        for turn in reversed(turns):
            token_ids, (start, end) = self._turn(messages[: turn + 1], tools)
            for row_ids, spans in rows:
                if row_ids[:end] == token_ids[:end]:
                    spans.insert(0, (start, end))
                    break
            else:
                rows.append((token_ids, [(start, end)]))
        return [EncodedChat(row_ids, tuple(sorted(spans))) for row_ids, spans in reversed(rows)]

    # -- templates with marks

    def _marked(self, messages: list[Message], tools) -> EncodedChat:
        encoded = self._encode(messages, tools, return_assistant_tokens_mask=True)
        token_ids, mask = encoded["input_ids"], encoded["assistant_masks"]
        edges = [i for i in range(len(mask) + 1) if (mask[i - 1] if i else 0) != (mask[i] if i < len(mask) else 0)]
        spans = [self._to_end_of_turn(token_ids, *span) for span in zip(edges[::2], edges[1::2], strict=True)]
        return EncodedChat(token_ids, tuple(spans))

    def _to_end_of_turn(self, token_ids: list[int], start: int, end: int) -> Span:
        """The span with its end-of-turn token, and without the newline behind it; marks may end at either."""
        stops = [i for i in range(start, end) if token_ids[i] in self.eos_ids]
        if stops:
            return start, stops[-1] + 1
        return start, end + (end < len(token_ids) and token_ids[end] in self.eos_ids)

    # -- templates without

    def _turn(self, messages: list[Message], tools) -> tuple[list[int], Span]:
        """A chat that ends with an assistant turn, and the span of that turn."""
        token_ids = self._encode(messages, tools)["input_ids"]
        text = self._render(messages, tools)
        with_placeholder = self._render([*messages[:-1], {"role": "assistant", "content": PLACEHOLDER}], tools)
        before_content, placeholder, after_content = with_placeholder.partition(PLACEHOLDER)
        if not placeholder:
            raise ChatTemplateError("the chat template does not render the assistant's messages")
        written_from = self._start(messages[:-1], tools, text, before_content)
        start_ids = self._tokenize(text[:written_from])
        start = len(start_ids)
        if token_ids[:start] != start_ids:
            raise ChatTemplateError("the template's text and the assistant's first characters share a token")
        stop = next((i for i in range(start, len(token_ids)) if token_ids[i] in self.eos_ids), None)
        if stop is not None:
            return token_ids, (start, stop + 1)
        if not text.endswith(after_content):
            raise ChatTemplateError("the end of an assistant turn cannot be found: no end-of-turn token follows it")
        end_ids = self._tokenize(text[: len(text) - len(after_content)])
        end = next((i for i, pair in enumerate(zip(end_ids, token_ids, strict=False)) if pair[0] != pair[1]), None)
        end = min(len(end_ids), len(token_ids)) if end is None else end  # a token shared with the template stays out
        if end <= start:
            raise ChatTemplateError("an assistant turn is empty")
        return token_ids, (start, end)

    def _start(self, earlier: list[Message], tools, text: str, before_content: str) -> int:
        """Where the assistant's text of the last turn begins in the rendered `text`.

        That is after the generation prompt, and after anything that the template puts before *every* content (an empty
        thinking block); leading blanks are the assistant's.
        """
        prompt = without_prompt = ""
        if earlier:
            prompt = self._render(earlier, tools, add_generation_prompt=True)
            without_prompt = self._render(earlier, tools)
        if text.startswith(before_content):
            is_prompted = before_content.startswith(prompt) and bool(earlier)
            return len(prompt) if is_prompted and not before_content[len(prompt) :].strip() else len(before_content)
        if earlier and text.startswith(prompt):
            has_generation_prompt = prompt != without_prompt
            has_no_header = (
                before_content.startswith(without_prompt) and not before_content[len(without_prompt) :].strip()
            )
            if has_generation_prompt or has_no_header:
                return len(prompt)
        raise ChatTemplateError(
            "the chat template does not render an assistant turn as its generation prompt introduces it "
            "(thinking in the chat but switched off in the template's options?)"
        )

    # -- the tokenizer

    def _render(self, messages: list[Message], tools, **options) -> str:
        return self._apply(messages, tools, tokenize=False, **options)

    def _encode(self, messages: list[Message], tools, **options) -> Any:
        return self._apply(messages, tools, tokenize=True, return_dict=True, **options)

    def _tokenize(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _apply(self, messages: list[Message], tools, **options) -> Any:
        from jinja2 import TemplateError

        try:
            return self.tokenizer.apply_chat_template(messages, tools=tools, **self.options, **options)
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise ChatTemplateError(f"the chat template refuses a chat: {error}") from error


def asked_mode(tokenizer: PreTrainedTokenizerBase, thinking: bool | None = None) -> str | None:
    """[`chat_mode`] of prompts in the tokenizer's own template; `None` if it cannot be told.

    Args:
        thinking (`bool`, *optional*): The template's `enable_thinking`; ignored if the template does not read it.
    """
    if not tokenizer.chat_template:
        return None
    template = ChatTemplate(tokenizer, set())
    if thinking is not None and re.search(r"\benable_thinking\b", template.source):
        template.options = {"enable_thinking": thinking}
    return chat_mode(template.describe(), tokenizer)


def chat_mode(described: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None) -> str | None:
    """How a target was prompted: "thinking" or "non-thinking" if its template has such a switch, else "chat"; "raw"
    without a template.

    Args:
        described (`dict`): From [`ChatTemplate.describe`], as the data file's header holds it.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): The target's, to find out its template's default.

    Returns:
        `str`, or `None` if it cannot be told: the template that was used is not the tokenizer's.
    """
    digest, options = described.get("sha256", ""), described.get("options") or {}
    if digest is None:
        return "raw"
    for switch in THINKING_SWITCHES:
        if isinstance(options.get(switch), bool):
            return "thinking" if options[switch] else "non-thinking"
    if tokenizer is None or not tokenizer.chat_template:
        return None
    template = ChatTemplate(tokenizer, set())
    if template.describe()["sha256"] != digest:
        return None

    def prompt_ids(**switches) -> list[int]:
        template.options = {**options, **switches}
        return template.encode_prompt([{"role": "user", "content": PLACEHOLDER}])

    try:
        for switch in THINKING_SWITCHES:
            if re.search(rf"\b{switch}\b", template.source):
                on, off, default = prompt_ids(**{switch: True}), prompt_ids(**{switch: False}), prompt_ids()
                if on != off:
                    return "thinking" if default == on else "non-thinking" if default == off else None
    except ChatTemplateError:
        return None
    return "chat"
