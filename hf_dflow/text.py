"""What passes between the package and a user: text from files, text on terminals, and who may read saved files."""

import codecs
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path

from hf_dflow.errors import DFlowError

# Controls but tab and newline, line separators, marks that reorder what follows, and halves of undecodable names.
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def read_text(path: str | Path) -> str:
    """The text of a user's file in UTF-8, with or without a byte-order mark.

    Raises:
        DFlowError: It cannot be read, or is in another encoding; the message names the line.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise DFlowError(f"{path}: cannot be read ({error.strerror or error})") from error
    return decode(content, path)


def decode(content: bytes, path: str | Path, first_line: int = 1) -> str:
    """The text of `content`, which begins at a line of the file `path`.

    Raises:
        DFlowError: As [`read_text`].
    """
    if first_line == 1 and content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise _refusal(path, 1, "it begins as UTF-16 does")
    content = content.removeprefix(codecs.BOM_UTF8) if first_line == 1 else content
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + content.count(b"\n", 0, error.start)
        raise _refusal(path, line, f"byte 0x{content[error.start]:02x}") from error
    if "\0" in text:
        line = first_line + text.count("\n", 0, text.index("\0"))
        raise _refusal(path, line, "a zero byte, as in UTF-16")
    return text.replace("\r\n", "\n")


def _refusal(path: str | Path, line: int, reason: str) -> DFlowError:
    return DFlowError(
        f"{path}, line {line}: not text in UTF-8 ({reason}); save the file as UTF-8, for example with "
        "iconv -f ENCODING -t UTF-8"
    )


def visible(text: str) -> str:
    r"""`text` with what a terminal would take for commands written out, as `\x1b`."""
    return UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text.replace("\r\n", "\n"))


def give_usual_modes(files: Iterable[Path]) -> None:
    """Give files the mode of any new file beside them: safetensors writes its own for their owner alone.

    The mode is taken off a new file, since asking for the umask means to change it, for all threads.
    """
    for file in files:
        new = file.with_name(f".{file.name}.{os.getpid()}.mode")
        try:
            new.touch()
            file.chmod(stat.S_IMODE(new.stat().st_mode))
        finally:
            new.unlink(missing_ok=True)
