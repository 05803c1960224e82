"""Putting a drafter on the Hub: what would be uploaded, and the upload."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_dflow.errors import DFlowError
from hf_dflow.hub.cards import check_card


class CardError(DFlowError, ValueError):
    """A model card lacks something that a reader or the Hub needs."""


@dataclass(frozen=True)
class Upload:
    """One file of a publication."""

    path: str  # in the repository
    size: int  # bytes


@contextmanager
def staged(drafter: Any, repository: str, card: str | None) -> Iterator[Path]:
    """A temporary folder laid out as the repository will be; without a card, the template's goes there.

    Raises:
        [`CardError`]: Listing what the card lacks; nothing is written.
    """
    problems = [] if card is None else check_card(card)
    if problems:
        raise CardError(f"the model card is not ready: {'; '.join(problems)}. `hf-dflow card check` shows this list.")
    folder = Path(tempfile.mkdtemp())
    try:
        if card is not None:
            (folder / "README.md").write_text(card, encoding="utf-8")
        drafter.save_pretrained(folder, repository=repository)
        yield folder
    finally:
        shutil.rmtree(folder)


def uploads(folder: Path) -> list[Upload]:
    """The files of a staged folder."""
    files = sorted(one for one in folder.rglob("*") if one.is_file())
    return [Upload(one.relative_to(folder).as_posix(), one.stat().st_size) for one in files]


def publish(
    drafter: Any,
    repository: str,
    card: str | None,
    *,
    token: str | bool | None = None,
    private: bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    message: str | None = None,
    dry_run: bool = False,
) -> tuple[list[Upload], Any]:
    """Upload `drafter` to `repository`, which is made where it does not exist.

    Args:
        drafter (`DFlowDrafter`): With its configuration complete.
        repository (`str`): `"owner/name"`.
        card (`str`, *optional*): Text of the finished model card; `None` sends the template's, with its marks.
        token, private, revision, create_pr, message: As in `huggingface_hub.HfApi.upload_folder`.
        dry_run (`bool`): Only say what would be uploaded; nothing is sent.

    Returns:
        The files, and huggingface_hub's `CommitInfo` (`None` in a dry run).

    Raises:
        [`CardError`]: The card is not ready.
    """
    with staged(drafter, repository, card) as folder:
        files = uploads(folder)
        if dry_run:
            return files, None
        from huggingface_hub import HfApi

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
        return files, commit
