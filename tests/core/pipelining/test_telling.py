"""What people are told of a pipeline."""

from __future__ import annotations

from syncline.core.pipelining.telling import pipeline_lines, stages_told
from syncline.stats import StageStats


def stages(*busy: float, steps: int = 10) -> list[StageStats]:
    return [
        StageStats(
            stage=number,
            num_steps=steps,
            busy_seconds=seconds,
            step_seconds=2.0,
            layers=f"blocks.{number}",
            sent_bytes=steps * 3 * 1024,
            parameter_bytes=5 << 20,
        )
        for number, seconds in enumerate(busy)
    ]


def test_the_slowest_stage_is_what_the_others_wait_for() -> None:
    head, *rest = pipeline_lines("worker-1", stages(1.0, 1.8, 0.8))
    assert head == "worker-1: 200.0 ms in its stages for a step, bubble 40%; stage 0, 2 waits for stage 1"
    assert rest[1] == "  stage 1 computes 90% of it: blocks.1; parameters 5 MiB, to other stages 3 KiB a step"


def test_even_stages_wait_for_none() -> None:
    assert pipeline_lines("worker-0", stages(1.6, 1.5))[0].endswith("bubble 22%; no stage waits for a slower one")


def test_nothing_is_said_where_there_is_no_pipeline_or_no_step() -> None:
    assert pipeline_lines("worker-0", []) == [] == pipeline_lines("worker-0", stages(0.0, 0.0, steps=0))
    assert stages_told({"worker-0": [], "worker-1": stages(0.0, 0.0, steps=0)}) == ""


def test_the_live_line_has_the_mean_of_all_pipelines() -> None:
    told = stages_told({"worker-0": stages(1.0, 2.0), "worker-1": stages(2.0, 2.0)})
    assert told == "stages 75%, 100%, bubble 12%"
