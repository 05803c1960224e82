"""How the site reads docstrings: in transformers' style, types of arguments hold Markdown and links are `[`Name`]`."""

import re

import griffe

ARGUMENT = re.compile(r"^(\s*[\w, *]+) \((`.*)\):", re.MULTILINE)
MARKUP = re.compile(r"`|\*(?=\w)|(?<=\w)\*")
LINK = re.compile(r"\[(`)~?(?:[\w.]+\.)?(\w+`)\]")


class TransformersStyle(griffe.Extension):
    """Types of arguments as plain words, links as code."""

    def on_object(self, *, obj: griffe.Object, **kwargs) -> None:
        if obj.docstring is not None:
            text = ARGUMENT.sub(lambda found: f"{found[1]} ({MARKUP.sub('', found[2])}):", obj.docstring.value)
            obj.docstring.value = LINK.sub(r"\1\2", text)
