"""Avoids loading torch's compiler, which the first optimizer imports: a second that most processes do not need."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

_NAME = "torch._dynamo"


def leave_out_the_compiler() -> None:
    """Call it after torch is loaded. A script that compiles still loads the compiler.

    torch marks a method as not compilable at its first call, and checks for an existing mark before it loads the
    compiler. If it stops checking, only that second is lost.
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
        if compiler is None or not hasattr(compiler, "disable"):  # missing, or being imported
            return plain(*given, **options)
        made = compiler.disable(plain, True, wrapping=False)
        setattr(plain, "__dynamo_disable", made)
        return made(*given, **options)

    return call
