"""What passes between the package and a user: text from files, text on terminals, and who may read saved files."""

import re
import shutil
from pathlib import Path

from hf_dflow.errors import DFlowError

# Controls but tab and newline, line separators, and marks that reorder what follows them.
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def read_text(path: str | Path) -> str:
    """The text of a user's file in UTF-8, with or without a byte-order mark.

    Raises:
        DFlowError: It cannot be read, or is in another encoding; the message names the line.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise DFlowError(f"{path}: cannot be read ({error.strerror or error})") from error
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DFlowError(
            f"{path}, line {line}: not text in UTF-8 (byte 0x{content[error.start]:02x}); save the file as UTF-8, for "
            "example with iconv -f ENCODING -t UTF-8"
        ) from error


def visible(text: str) -> str:
    r"""`text` with what a terminal would take for commands written out, as `\x1b`."""
    return UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text.replace("\r\n", "\n"))


def give_usual_modes(folder: Path) -> None:
    """Let others read weights as they may read the configuration: safetensors writes files for their owner alone."""
    for file in folder.rglob("*.safetensors"):
        shutil.copymode(folder / "config.json", file)
