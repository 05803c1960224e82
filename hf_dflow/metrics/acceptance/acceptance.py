"""How much of what was drafted was accepted, and what that came to a second."""

import datasets
import evaluate

from hf_dflow.errors import DFlowError
from hf_dflow.metrics import check_seconds, report_acceptance, statistics_of

DESCRIPTION = "Acceptance of drafts in speculative decoding, and effective throughput with and without bonus tokens."
INPUTS = """
Args:
    accepted (list of int): accepted drafts of each step, the bonus token not counted.
    drafted (list of int): drafts verified in each step.
    wall_seconds (float, optional): what the steps took; without it no throughput is returned.
    output_tokens (int, optional): all tokens that entered the output; those of the steps by default.
    emitted (list of int, optional): tokens that each step put into the output; accepted drafts and one by default.
    offered (list of int, optional): drafts of each step that were judged, none behind a text's end; all by default.
    target_forwards (int, optional): of the target, prefills and steps without drafts included; needs output_tokens.
Returns:
    accept_rate (of judged drafts), wasted_ratio (of all drafts), mean_accepted_length (bonus not counted),
    mean_acceptance_length (that and 1, as vLLM counts), tokens_per_step (emitted tokens), num_spec_steps,
    num_draft_tokens, num_accepted_draft_tokens; with target_forwards also tokens_per_target_forward; with wall_seconds
    also effective_tps (accepted drafts a second) and effective_tps_with_bonus (output tokens a second).
Example:
    >>> import evaluate, hf_dflow.metrics
    >>> metric = evaluate.load(hf_dflow.metrics.folder("acceptance"))
    >>> metric.compute(accepted=[3, 1], drafted=[4, 4], wall_seconds=2.0)["effective_tps_with_bonus"]
    3.0
"""


class Acceptance(evaluate.Metric):
    """See `INPUTS`."""

    def _info(self):
        whole = datasets.Value("int64")
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="",
            inputs_description=INPUTS,
            features=datasets.Features({"accepted": whole, "drafted": whole}),
        )

    def _compute(
        self,
        accepted,
        drafted,
        wall_seconds=None,
        output_tokens=None,
        emitted=None,
        offered=None,
        target_forwards=None,
    ):
        statistics = statistics_of(accepted, drafted, emitted=emitted, offered=offered)
        counts = {
            "mean_accepted_length": statistics.mean_accepted_length,
            "mean_acceptance_length": statistics.mean_acceptance_length,
            "tokens_per_step": statistics.tokens_per_step,
            "num_spec_steps": statistics.num_spec_steps,
            "num_draft_tokens": statistics.num_draft_tokens,
            "num_accepted_draft_tokens": statistics.num_accepted_draft_tokens,
        }
        if target_forwards is not None:
            if not output_tokens or target_forwards < 1:
                raise DFlowError(
                    f"target_forwards={target_forwards}, output_tokens={output_tokens}; give both, each 1 or more"
                )
            counts["tokens_per_target_forward"] = output_tokens / target_forwards
        if wall_seconds is None:
            return {"accept_rate": statistics.draft_acceptance_rate, "wasted_ratio": statistics.wasted_ratio, **counts}
        check_seconds(wall_seconds)
        if output_tokens is None:
            output_tokens = statistics.num_step_tokens
        report = report_acceptance(
            statistics.num_draft_tokens,
            statistics.num_accepted_draft_tokens,
            wall_seconds,
            statistics.num_offered_draft_tokens,
        )
        return {**report, "effective_tps_with_bonus": output_tokens / wall_seconds, **counts}
