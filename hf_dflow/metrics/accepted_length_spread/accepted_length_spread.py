"""How steady acceptance is, from step to step and from task to task."""

from statistics import pstdev

import datasets
import evaluate

from hf_dflow.metrics import statistics_of

DESCRIPTION = "Spread of the accepted length in speculative decoding: over steps, and over kinds of tasks."
INPUTS = """
Args:
    accepted (list of int): accepted drafts of each step, the bonus token not counted.
    drafted (list of int): drafts verified in each step.
    tasks (list of str): the kind of task that each step belongs to; one name for all where there is one kind.
Returns:
    accepted_length_std: population standard deviation over all steps.
    accepted_length_std_over_tasks: that of the tasks' mean accepted lengths, each task counted once.
    mean_accepted_length_by_task, accepted_length_std_by_task: of each kind of task.
"""


class AcceptedLengthSpread(evaluate.Metric):
    """See `INPUTS`."""

    def _info(self):
        whole = datasets.Value("int64")
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="",
            inputs_description=INPUTS,
            features=datasets.Features({"accepted": whole, "drafted": whole, "tasks": datasets.Value("string")}),
        )

    def _compute(self, accepted, drafted, tasks):
        steps = list(zip(accepted, drafted, tasks, strict=True))
        groups = {}
        for task in dict.fromkeys(tasks):
            of_task = [(kept, tried) for kept, tried, name in steps if name == task]
            groups[task] = statistics_of(*map(list, zip(*of_task, strict=True)))
        means = {task: group.mean_accepted_length for task, group in groups.items()}
        return {
            "accepted_length_std": statistics_of(accepted, drafted).accepted_length_std,
            "accepted_length_std_over_tasks": pstdev(means.values()),
            "mean_accepted_length_by_task": means,
            "accepted_length_std_by_task": {task: group.accepted_length_std for task, group in groups.items()},
        }
