"""Importing the package is cheap, and teaches transformers the flag and the drafter in whatever order things come."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import hf_dflow

DRAFTER = Path(hf_dflow.__file__).parent / "drafters" / "tiny-airports-b8" / "drafter"
HEAVY = ("torch", "transformers", "numpy", "httpx", "jinja2")
# What a process imports first.
ORDERS = {
    "the package first": "import hf_dflow; import transformers",
    "transformers first": "from transformers import AutoModel, GenerationMixin; import hf_dflow",
    "transformers not yet used": "import transformers; import hf_dflow",
    "generation first": "import transformers.generation.utils; import hf_dflow",
    "modeling_utils second": "import hf_dflow; import transformers.modeling_utils",
    "a module that the drafter uses": "import hf_dflow; from transformers import Qwen3ForCausalLM",
    "a model that uses Auto classes": "import hf_dflow; from transformers import LlavaForConditionalGeneration",
    "only the configuration": "from hf_dflow.model.configuration import DFlowDrafterConfig",
    "only the drafter": "import hf_dflow.model.drafter",
    "only the seam": "import hf_dflow.generation.strategy",
    "only the loop": "from hf_dflow import DFlowDecoder",
    "uninstalled and installed": (
        "import hf_dflow; hf_dflow.uninstall(); from transformers import AutoModel, GenerationMixin\n"
        "assert not hasattr(GenerationMixin._assisted_decoding, '_hf_dflow_original')\n"
        "hf_dflow.install()"
    ),
}
IS_KNOWN = f"""
from transformers import AutoConfig, AutoModel, GenerationMixin
import hf_dflow
assert type(AutoConfig.from_pretrained({str(DRAFTER)!r})) is hf_dflow.DFlowDrafterConfig
assert type(AutoModel.from_pretrained({str(DRAFTER)!r})) is hf_dflow.DFlowDrafter
for name in ("_validate_generation_mode", "_assisted_decoding"):
    original = getattr(GenerationMixin, name)._hf_dflow_original
    assert original.__module__ == "transformers.generation.utils" and not hasattr(original, "_hf_dflow_original")
"""
# A process for each order, forked from one that has imported what transformers imports, but not transformers.
FORKS = f"""
import accelerate, json, os, scipy.optimize, sys, torch._dynamo, traceback
ready = [name for name in sys.modules if name.split(".")[0] in ("transformers", "hf_dflow")]
assert not ready, ready
for name, code in {ORDERS!r}.items():
    pid = os.fork()
    if pid == 0:
        error = ""
        try:
            exec(code + {IS_KNOWN!r}, {{"__name__": "fresh"}})
        except BaseException:
            error = traceback.format_exc()
        print("\\n" + json.dumps([name, error]), flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
"""


def run(code: str) -> str:
    """What a fresh process prints."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def errors() -> dict[str, str]:
    """For each order the traceback that it ended with, if any."""
    lines = [line for line in run(FORKS).splitlines() if line.startswith("[")]
    return dict(json.loads(line) for line in lines)


@pytest.mark.parametrize("order", ORDERS)
def test_transformers_knows_the_flag_and_the_drafter(order, errors):
    """Catches a hook that comes too late, that imports a half-imported module of transformers, or that leads back into
    our own half-imported one; a stand-in in place of the class; a seam that is installed twice."""
    assert errors[order] == ""


@pytest.mark.parametrize("module", ["hf_dflow", "hf_dflow.cli"])
def test_importing_is_cheap(module):
    """Catches one import at the top of a module that brings torch along: seconds for each `hf-dflow --help`."""
    code = f"import sys, {module}; dir(hf_dflow); print([name for name in {HEAVY} if name in sys.modules])"
    assert run(code).strip() == "[]"


def test_help_and_version_need_no_torch():
    code = (
        "import sys; from hf_dflow.cli import app; from typer.testing import CliRunner\n"
        "for arguments in (['--help'], ['--version'], ['bench', '--help'], ['train', '--help'], ['demo', '--help']):\n"
        "    result = CliRunner().invoke(app, arguments)\n"
        "    assert result.exit_code == 0, result.output\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    assert run(code).strip() == "[]"


def test_public_names_are_listed_and_exist():
    """Catches a name in the stub that its module no longer has, or one that dir() does not show."""
    assert list(hf_dflow.__all__) == sorted(hf_dflow.__all__) and set(hf_dflow.__all__) <= set(dir(hf_dflow))
    for name in hf_dflow.__all__:
        assert getattr(hf_dflow, name) is not None
    with pytest.raises(AttributeError, match="DFlowDraft"):
        _ = hf_dflow.DFlowDraft
