"""Saving a drafter as its repository will look, and uploading it."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitInfo, HfApi
from transformers import PreTrainedModel

from hf_dflow._version import __version__
from hf_dflow.errors import DFlowError
from hf_dflow.hub.cards import check_card, make_card
from hf_dflow.text import give_usual_modes, read_text

__all__ = ["CardError", "PublishableDrafter", "Upload", "publish", "write_custom_generate"]

# transformers copies this file elsewhere before running it, so it must be told where the weights are.
CUSTOM_GENERATE = '''"""Decode with the drafter of this repository: `target.generate(**inputs, custom_generate="{name}",
trust_remote_code=True)`. The same loop as `assistant_model=drafter, speculation_type="dflow"`."""

import os
import sys

import hf_dflow

REPOSITORY = {repository!r}


def generate(model, drafter=None, drafter_revision=None, streamer=None, **kwargs):
    source = drafter
    if source is None:  # transformers runs a copy of this file, and only its generate() knows the folder it lies in
        given = sys._getframe(1).f_locals.get("custom_generate")
        source = given if isinstance(given, str) and os.path.isdir(given) else REPOSITORY
        if source is None:
            raise ValueError("this folder was never published: pass drafter=, a drafter or its folder")
    if isinstance(source, (str, os.PathLike)):
        options = {{}} if drafter_revision is None else {{"revision": drafter_revision}}
        device = None if model.device.type == "meta" else model.device  # meta: the target is offloaded
        drafter = hf_dflow.DFlowDrafter.from_pretrained(source, device_map=device, **options)
    kwargs = {{key: value for key, value in kwargs.items() if value is not None}}
    return model.generate(custom_generate=hf_dflow.DFlowDecoder(drafter, streamer=streamer), **kwargs)
'''


class CardError(DFlowError, ValueError):
    """A model card lacks something that a reader or the Hub needs."""


@dataclass(frozen=True)
class Upload:
    """One file of a publication."""

    path: str  # in the repository
    size: int  # bytes


class PublishableDrafter(PreTrainedModel):
    """How a drafter is saved and published."""

    def save_pretrained(  # type: ignore[override]
        self, save_directory, *args, repository: str | None = None, **kwargs
    ) -> None:
        """As in transformers, safetensors only, together with what a published drafter needs.

        That is `custom_generate/`, and a model card for its maker to finish unless there is one.

        Args:
            save_directory (`str` or `Path`): Folder, made where it does not exist.
            repository (`str`, *optional*): The name under which it will be published.
            args, kwargs: As in transformers.
        """
        if kwargs.pop("push_to_hub", False):
            raise ValueError("save_pretrained does not take push_to_hub=True; call drafter.push_to_hub(…) instead.")
        before = {path: path.stat().st_ino for path in Path(save_directory).glob("*.safetensors")}
        super().save_pretrained(save_directory, *args, **kwargs)
        weights = list(Path(save_directory).glob("*.safetensors"))
        give_usual_modes(path for path in weights if path.stat().st_ino != before.get(path))
        if kwargs.get("is_main_process", True):
            write_custom_generate(Path(save_directory), repository)
            card = Path(save_directory) / "README.md"
            if not card.exists():
                card.write_text(make_card(self, repository), encoding="utf-8")

    def push_to_hub(  # type: ignore[override]
        self, repo_id: str, *, card: str | Path | None = None, **kwargs
    ) -> CommitInfo | None:
        """Publish this drafter.

        Args:
            repo_id (`str`): `"owner/name"`; made where it does not exist.
            card (`str` or `Path`, *optional*):
                The finished card's text or file. Without one the template is uploaded, its gaps marked.
            kwargs: As in [`~hf_dflow.hub.publishing.publish`].

        Returns:
            huggingface_hub's `CommitInfo`, `None` with `dry_run=True`.

        Raises:
            [`~hf_dflow.hub.publishing.CardError`]: The card is not ready.
        """
        if card is not None and not (isinstance(card, str) and "\n" in card):
            card = read_text(card)
        return publish(self, repo_id, card, **kwargs)[1]


def publish(
    drafter: PublishableDrafter,
    repository: str,
    card: str | None,
    *,
    token: str | bool | None = None,
    private: bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    message: str | None = None,
    dry_run: bool = False,
) -> tuple[list[Upload], CommitInfo | None]:
    """Upload `drafter` to `repository`, which is made where it does not exist.

    Args:
        drafter (`DFlowDrafter`): With its configuration complete.
        repository (`str`): `"owner/name"`.
        card (`str`, *optional*): Text of the finished model card; `None` sends the template with its gaps marked.
        token, private, revision, create_pr, message: As in `huggingface_hub.HfApi.upload_folder`.
        dry_run (`bool`): Only list what would be uploaded; nothing is sent.

    Returns:
        The files, and huggingface_hub's `CommitInfo` (`None` in a dry run).

    Raises:
        [`CardError`]: The card is not ready.
    """
    with _staged(drafter, repository, card) as folder:
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        uploads = [Upload(path.relative_to(folder).as_posix(), path.stat().st_size) for path in paths]
        if dry_run:
            return uploads, None
        api = HfApi(token=token)
        api.create_repo(repository, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repository, branch=revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            commit_message=message or "Upload drafter",
            revision=revision,
            create_pr=create_pr,
        )
        return uploads, commit


@contextmanager
def _staged(drafter: PublishableDrafter, repository: str, card: str | None) -> Iterator[Path]:
    """A temporary folder laid out as the repository will be."""
    problems = [] if card is None else check_card(card)
    if problems:
        raise CardError(f"the model card is not ready: {'; '.join(problems)}. `hf-dflow card check` shows this list.")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if card is not None:
            (folder / "README.md").write_text(card, encoding="utf-8")
        drafter.save_pretrained(folder, repository=repository)
        yield folder


def write_custom_generate(folder: Path, repository: str | None) -> None:
    """Write what `generate(custom_generate=repository)` runs: `custom_generate/generate.py` and its requirements."""
    target = folder / "custom_generate"
    target.mkdir(parents=True, exist_ok=True)
    script = CUSTOM_GENERATE.format(name=repository or "FOLDER", repository=repository)
    (target / "generate.py").write_text(script, encoding="utf-8")
    (target / "requirements.txt").write_text(f"hf-dflow>={__version__}\n", encoding="utf-8")
