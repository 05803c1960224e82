"""As in tests/: offline, one thread, kernels interpreted; and the modules of that folder can be imported."""

import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import torch

torch.set_num_threads(1)
