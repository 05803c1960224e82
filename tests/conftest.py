"""Every test runs offline and in one thread, can import the modules of this folder, and shares tiny models."""

import os
import runpy
import socket
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before huggingface_hub is imported: no test may reach the network
os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton: its own functions are made for one mode as well
sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch

TESTS = Path(__file__).parent
torch.set_num_threads(1)


# What also runs on the oldest supported transformers: seam, loop, caches, targets, loading, training as decoding.
OLDEST = (
    "test_seam", "test_loop", "test_caches", "test_selfcheck", "test_hybrids", "test_loading*", "test_layout_parity",
    "test_*rounds*",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    """Set the markers `real`, by folder, and `oldest`, by file."""
    missing = [pattern for pattern in OLDEST if not list(TESTS.rglob(f"{pattern}.py"))]
    if missing:
        raise pytest.UsageError(f"OLDEST in tests/conftest.py names no test file by {', '.join(missing)}")
    for item in items:
        if TESTS / "real" in item.path.parents:
            item.add_marker(pytest.mark.real)
        if any(item.path.match(f"{pattern}.py") for pattern in OLDEST):
            item.add_marker(pytest.mark.oldest)


@pytest.fixture(scope="session")
def target():
    """The tiny Llama that most tests decode. Shared: a test that changes a model builds one with `kit.tiny_target`."""
    import kit

    return kit.shared_target()


@pytest.fixture(scope="session")
def drafter(target):
    """A drafter with a random relay for `target`, shared as it is."""
    import kit

    return kit.shared_drafter()


@pytest.fixture(scope="session")
def three_tokens():
    """A target over 3 tokens, whose laws can be enumerated."""
    import law

    return law.three_token_target()


@pytest.fixture(scope="session", autouse=True)
def _shared_models_stay_unchanged():
    """Shared models end the session with the weights and settings that they began with."""
    yield
    if "kit" in sys.modules:
        sys.modules["kit"].assert_shared_models_unchanged()


@pytest.fixture(autouse=True)
def _nothing_was_warned_of_before():
    """What is logged once in a process is logged once in each test."""
    if "transformers" in sys.modules:
        from transformers.utils import logging

        logging.warning_once.cache_clear()


@pytest.fixture
def launched_kernels(monkeypatch):
    """Names of the Triton kernels that were launched."""
    from hf_dflow.kernels.triton_tiles import Launch

    names, run = [], Launch.run
    monkeypatch.setattr(Launch, "run", lambda launch: (names.append(launch.kernel.fn.__name__), run(launch))[1])
    return names


@pytest.fixture
def run_example(monkeypatch, capsys):
    """`run_example("batch.py", *options)` runs an example in this process, offline, and returns what it prints."""

    def refuse(*args, **kwargs):
        raise AssertionError("an example tried to connect")

    def run(name, *options):
        for place in ("connect", "connect_ex"):
            monkeypatch.setattr(socket.socket, place, refuse)
        monkeypatch.setattr(sys, "argv", [name, *map(str, options)])
        runpy.run_path(str(TESTS.parent / "examples" / name), run_name="__main__")
        return capsys.readouterr().out

    return run
