"""torch's compiler, which its first optimizer loads: a second's worth of modules that most processes never use."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

_NAME = "torch._dynamo"


def leave_out_the_compiler() -> None:
    """Where torch is loaded. A script that compiles loads it all the same.

    torch marks a method as not to be compiled at its first call, and looks whether it has a mark before it loads the
    compiler to make one. Where it does not look, nothing is lost but that second.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or _NAME in sys.modules:
        return
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        plain = getattr(getattr(torch.optim.Optimizer, name, None), "__wrapped__", None)
        if plain is not None and not hasattr(plain, "__dynamo_disable"):
            setattr(plain, "__dynamo_disable", _marked(plain))


def _marked(plain: Callable[..., Any]) -> Callable[..., Any]:
    def call(*given: Any, **options: Any) -> Any:
        compiler: Any = sys.modules.get(_NAME)
        if compiler is None or not hasattr(compiler, "disable"):  # not there, or about to be
            return plain(*given, **options)
        made = compiler.disable(plain, True, wrapping=False)
        setattr(plain, "__dynamo_disable", made)
        return made(*given, **options)

    return call
