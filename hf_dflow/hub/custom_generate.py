"""The files with which transformers runs a published drafter as `generate(custom_generate="its repository")`."""

from pathlib import Path

from hf_dflow._version import __version__

# transformers copies this file elsewhere before it runs it, so it cannot know where the weights lie unless told.
SCRIPT = '''"""Decode with the drafter of this repository: `target.generate(**inputs, custom_generate="{name}",
trust_remote_code=True)`. The same loop as `assistant_model=drafter, speculation_type="dflow"`."""

import hf_dflow

REPOSITORY = {repository!r}


def generate(model, drafter=None, drafter_revision=None, streamer=None, **kwargs):
    if drafter is None and REPOSITORY is None:
        raise ValueError("this folder was never published, so it has no name to load the drafter by: pass drafter=")
    if drafter is None:
        options = {{}} if drafter_revision is None else {{"revision": drafter_revision}}
        device = None if model.device.type == "meta" else model.device  # meta: the target is offloaded
        drafter = hf_dflow.DFlowDrafter.from_pretrained(REPOSITORY, device_map=device, **options)
    kwargs = {{key: value for key, value in kwargs.items() if value is not None}}
    return model.generate(custom_generate=hf_dflow.DFlowDecoder(drafter, streamer=streamer), **kwargs)
'''


def write_custom_generate(folder: str | Path, repository: str | None) -> None:
    """Write `custom_generate/generate.py` and its requirements into `folder`, to be published as `repository`."""
    target = Path(folder) / "custom_generate"
    target.mkdir(parents=True, exist_ok=True)
    script = SCRIPT.format(name=repository or "FOLDER", repository=repository)
    (target / "generate.py").write_text(script, encoding="utf-8")
    (target / "requirements.txt").write_text(f"hf-dflow>={__version__}\n", encoding="utf-8")
