"""What a pipeline does, in words: for `status`, `--profile` and the live line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from syncline.core.units import size
from syncline.stats import StageStats, bubble

#: Processes that compute so much more of a step than others are what the others wait for.
UNEVEN = 0.1


def pipeline_lines(name: str, stages: Sequence[StageStats]) -> list[str]:
    """A line for the pipeline, with who waits for whom, and one for each of its processes."""
    if not stages or not stages[0].num_steps:
        return []
    steps, seconds = stages[0].num_steps, stages[0].step_seconds / stages[0].num_steps
    return [
        f"{name}: {seconds * 1e3:,.1f} ms in its stages for a step, bubble {bubble(stages):.0%}{_waits(stages)}",
        *(
            f"  stage {each.stage} computes {each.utilisation:.0%} of it: {each.layers}; parameters "
            f"{size(each.parameter_bytes)}, to other stages {size(each.sent_bytes / steps)} a step"
            for each in stages
        ),
    ]


def split_told(stages: Sequence[StageStats]) -> str:
    """In a cell of a table: the part of a step in which each stage computes."""
    return ", ".join(f"{each.utilisation:.0%}" for each in stages)


def _waits(stages: Sequence[StageStats]) -> str:
    """Who waits for whom: most of a step passes where one process computes and the others do not."""
    if len(stages) < 2:
        return ""
    busiest = max(stages, key=lambda each: each.utilisation)
    waiting = [each for each in stages if busiest.utilisation - each.utilisation > UNEVEN]
    if not waiting:
        return "; no stage waits for a slower one"
    who = ", ".join(str(each.stage) for each in waiting)
    return f"; stage {who} waits for stage {busiest.stage}"


def stages_told(pipelines: Mapping[str, Sequence[StageStats]]) -> str:
    """For the live line, of all pipelines: the part of a step in which each stage computes, and the bubble."""
    known = [stages for stages in pipelines.values() if stages and stages[0].num_steps]
    if not known:
        return ""
    parts = [
        sum(column) / len(column) for column in zip(*([e.utilisation for e in each] for each in known), strict=False)
    ]
    mean = sum(bubble(each) for each in known) / len(known)
    return f"stages {', '.join(f'{part:.0%}' for part in parts)}, bubble {mean:.0%}"
