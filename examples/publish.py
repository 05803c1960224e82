"""Publish a drafter: what would be uploaded, and only with --upload the upload itself. Dry runs work offline.

The card must be finished first: `hf-dflow card new DRAFTER --license … > README.md` begins one, `hf-dflow card check`
says what it lacks. To upload, log in with `hf auth login`. The same from a shell: `hf-dflow publish`.
"""

import argparse
from pathlib import Path

import hf_dflow
from hf_dflow.bench.tiny import TINY_DRAFTER
from hf_dflow.hub.cards import check_card
from hf_dflow.hub.publishing import publish

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--drafter", type=Path, default=TINY_DRAFTER, help="folder; the tiny one by default")
parser.add_argument("--card", type=Path, default=Path(__file__).parent.parent / "model_cards" / "tiny-airports-b8.md")
parser.add_argument("--upload", action="store_true", help="really send it")
parser.add_argument("repository", nargs="?", default="me/tiny-airports-b8", help="owner/name on the Hub")
arguments = parser.parse_args()

drafter = hf_dflow.DFlowDrafter.from_pretrained(arguments.drafter)
card = arguments.card.read_text(encoding="utf-8")
if problems := check_card(card):
    raise SystemExit("The card is not ready:\n" + "\n".join(f"  {problem}" for problem in problems))

files, commit = publish(drafter, arguments.repository, card, private=True, dry_run=not arguments.upload)
for file in files:
    print(f"{file.size:>12,}  {file.path}")
if arguments.upload:
    print(f"Published: {commit.commit_url}")
else:
    print(f"Dry run: these {len(files)} files would go to {arguments.repository}; nothing was sent.")
