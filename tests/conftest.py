"""Offline, one thread, `tests/` importable."""

import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before huggingface_hub is imported: no test may reach the network
os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton: its own functions are made for one mode as well
sys.path.insert(0, str(Path(__file__).parent))

import torch

torch.set_num_threads(1)
