"""Tests of the plugin inside vLLM, which lives in an environment of its own: `make test-vllm`."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]
