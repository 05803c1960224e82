"""The code blocks that documents mark as runnable, but that take long."""

import pytest
from block_runner import run_shell, runnable
from documents import NIGHTLY

PAGES = runnable(NIGHTLY)


@pytest.mark.parametrize("document", PAGES)
def test_shell_blocks(document, tmp_path):
    """Bug: a command that a reader copies is refused, or needs the network."""
    assert run_shell(PAGES[document], tmp_path)
