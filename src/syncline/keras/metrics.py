"""The metrics of an epoch, merged over the workers before Keras or any callback sees them."""

from __future__ import annotations

from typing import Any, Protocol

#: What `install` sets on a model.
_SET = ("_get_metrics_result_or_logs", "evaluate", "fit")


class Merges(Protocol):
    """What merges them: the callback of this `fit`."""

    has_ended: bool  #: the rest of `fit` has no batches

    def merged(self, logs: dict[str, Any]) -> dict[str, Any]: ...
    def last_seen(self, what: str, default: dict[str, Any]) -> dict[str, Any]: ...
    def leave(self) -> None: ...


def install(model: Any, merging: Merges) -> None:
    """Keras asks its model for the metrics of an epoch before any callback sees them: from here all get merged ones.

    An evaluation that a callback of yours starts inside of `fit` is its worker's own.
    """
    result, evaluate = type(model)._get_metrics_result_or_logs, type(model).evaluate

    def get_metrics_result_or_logs(logs: Any) -> Any:
        if merging.has_ended:  # on JAX the metrics have no values in an epoch without a batch
            return merging.last_seen("training", logs)
        return merging.merged(result(model, logs))

    def evaluate_alone(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("_use_cached_eval_dataset"):
            if merging.has_ended:
                return merging.last_seen("validation", {})
            return evaluate(model, *args, **kwargs)
        remove(model)
        try:
            return evaluate(model, *args, **kwargs)
        finally:
            install(model, merging)

    def fit_again(*args: Any, **kwargs: Any) -> Any:
        merging.leave()
        return type(model).fit(model, *args, **kwargs)

    for name, function in zip(_SET, (get_metrics_result_or_logs, evaluate_alone, fit_again), strict=True):
        object.__setattr__(model, name, function)


def remove(model: Any) -> None:
    """`fit` has ended: the model is as before."""
    for name in _SET:
        model.__dict__.pop(name, None)
