"""A file of rows that grows by whole batches and can be continued after a kill at any moment."""

import json
import os
from pathlib import Path
from typing import Any

from hf_dflow.errors import DFlowError
from hf_dflow.training.data import HEADER_KEY, parse_row

FORMAT_VERSION = 1


class RowFile:
    """JSON lines: a header that says how the rows were made, then one row a line.

    An existing file is continued. What a kill left of a half-written last line is cut off.

    Args:
        path (`Path`): The file; made if it does not exist.
        settings (`dict[str, Any]`): All that the rows depend on, as JSON. An existing file must have been made with
            the same.

    Raises:
        DFlowError: The file was made with other settings, or is no such file.
    """

    def __init__(self, path: Path, settings: dict[str, Any]):
        self.path = path
        header = json.dumps({HEADER_KEY: FORMAT_VERSION, **settings}) + "\n"
        content = path.read_bytes() if path.exists() else b""
        whole, _, torn = content.rpartition(b"\n")
        if not whole and not header.encode().startswith(torn):
            raise DFlowError(f"{path} is no data file of hf-dflow; give another output file")
        self._ends: list[int] = []  # byte offset behind each row
        self._tokens: list[int] = []
        self._finished: list[bool] = []
        if not whole:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._write(0, header.encode())
            self._header_end = len(header.encode())
            return
        lines = whole.split(b"\n")
        self._require_same(lines[0], json.loads(header))
        end = self._header_end = len(lines[0]) + 1
        for number, line in enumerate(lines[1:], 2):
            try:
                record = json.loads(line)
                row = parse_row(record)
            except (KeyError, TypeError, ValueError) as error:
                raise DFlowError(
                    f"{path}, line {number}: damaged ({error}); delete the file and start again"
                ) from error
            end += len(line) + 1
            self._ends.append(end)
            self._tokens.append(row.supervised_tokens)
            self._finished.append(bool(record["finished"]))
        if torn:
            self._write(end, b"")

    @property
    def rows(self) -> int:
        return len(self._ends)

    @property
    def supervised_tokens(self) -> int:
        return sum(self._tokens)

    @property
    def finished(self) -> int:
        """Rows whose last turn came to its end."""
        return sum(self._finished)

    def keep(self, rows: int) -> None:
        """Drop all rows but the first `rows`."""
        if rows < self.rows:
            del self._ends[rows:], self._tokens[rows:], self._finished[rows:]
            self._write(self._end, b"")

    def append(self, records: list[dict[str, Any]]) -> None:
        """Write rows and wait until they are on the disk.

        Raises:
            DFlowError: Somebody else has written to the file.
        """
        if self.path.stat().st_size != self._end:
            raise DFlowError(f"{self.path} changed while it was being written: is another hf-dflow data running on it?")
        lines = [(json.dumps(record) + "\n").encode() for record in records]
        self._write(self._end, b"".join(lines))
        for line, record in zip(lines, records, strict=True):
            self._ends.append(self._end + len(line))
            self._tokens.append(sum(end - start for start, end in record["spans"]))
            self._finished.append(record["finished"])

    @property
    def _end(self) -> int:
        return self._ends[-1] if self._ends else self._header_end

    def _write(self, offset: int, content: bytes) -> None:
        with open(self.path, "r+b" if self.path.exists() else "xb") as file:
            file.seek(offset)
            file.write(content)
            file.truncate()
            file.flush()
            os.fsync(file.fileno())

    def _require_same(self, line: bytes, header: dict[str, Any]) -> None:
        try:
            found = json.loads(line)
            is_header = HEADER_KEY in found
        except (TypeError, ValueError):
            is_header = False
        if not is_header:
            raise DFlowError(f"{self.path} is no data file of hf-dflow; give another output file")
        differing = [
            f"{key} was {found.get(key)!r} and is {header.get(key)!r}"
            for key in {**found, **header}
            if found.get(key) != header.get(key)
        ]
        if differing:
            raise DFlowError(
                f"{self.path} was made with other settings ({'; '.join(differing)}); "
                "use the same ones to continue it, or another output file"
            )
