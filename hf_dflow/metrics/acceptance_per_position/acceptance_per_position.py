"""At which position of a block drafts are lost."""

import datasets
import evaluate

from hf_dflow.metrics import statistics_of

DESCRIPTION = "Acceptance of drafts by their position in the block, in speculative decoding."
INPUTS = """
Args:
    accepted (list of int): accepted drafts of each step, the bonus token not counted.
    drafted (list of int): drafts verified in each step.
    positions (list of int, optional): positions of each step that were judged, none behind a text's end; all by
        default.
Returns:
    acceptance_rate_per_position: of the steps in which position 1, 2, … was judged, the share whose accepted length
        reaches it (vLLM divides by all steps).
    conditional_acceptance_rate_per_position: share of the steps that judged this position and accepted all before
        it; None where there is no such step.
    acceptance_histogram: steps that accepted 0, 1, … drafts.
"""


class AcceptancePerPosition(evaluate.Metric):
    """See `INPUTS`."""

    def _info(self):
        whole = datasets.Value("int64")
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="",
            inputs_description=INPUTS,
            features=datasets.Features({"accepted": whole, "drafted": whole}),
        )

    def _compute(self, accepted, drafted, positions=None):
        statistics = statistics_of(accepted, drafted, positions=positions)
        return {
            "acceptance_rate_per_position": statistics.acceptance_rate_per_position,
            "conditional_acceptance_rate_per_position": statistics.conditional_acceptance_rate_per_position,
            "acceptance_histogram": statistics.acceptance_histogram,
        }
