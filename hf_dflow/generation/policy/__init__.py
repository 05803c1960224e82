"""How much a row drafts.

One protocol, [`DraftPolicy`](base.py), with three questions. *Before* the drafter runs: does this step draft at all?
*Before anything is sampled* from the draft law: how many drafts, or which tree, does the target verify? *Afterwards*:
what is learned? Every answer follows from past steps or from the draft law, never from sampled drafts, so the output
keeps the target's law.
"""
