"""`--outer`: read without evaluating anything, checked at launch."""

from __future__ import annotations

import re

import pytest

from syncline.config import JobConfig
from syncline.core.rule import Rule, outer_of, parse_outer
from syncline.core.settings import check_settings
from syncline.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("SGD(lr=0.7, momentum=0.9, nesterov=True)", Rule("SGD", lr=0.7, momentum=0.9, nesterov=True)),
        (" SGD ( lr = 1 , ) ", Rule("SGD", lr=1)),
        ("Adam(lr=1e-3,betas=(0.9, .95),amsgrad=False)", Rule("Adam", lr=1e-3, betas=(0.9, 0.95), amsgrad=False)),
        ("Adagrad(lr=+2., eps=1E-8)", Rule("Adagrad", lr=2.0, eps=1e-8)),
    ],
)
def test_it_is_said_as_it_is_made(text: str, rule: Rule) -> None:
    assert parse_outer(text) == rule


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("SGD", "write it as in Python"),
        ("SGD(0.7)", "'0.7' is not name=value"),
        ("SGD(lr=0.7", "write it as in Python"),
        ("SGD(lr=0.7 momentum=0.9)", "not name=value"),
        ("SGD(lr=0.7, lr=0.8)", "lr is given twice"),
        ("SGD(lr=0.7, speed=3)", "rule SGD has no option 'speed'; it has: lr, momentum"),
        ("SGD(momentum=0.9)", "give its lr"),
        ("SGD(lr=__import__)", "lr='__import__' is not a number"),
        ("SGD(lr=1e999)", "lr=1e999 is too large"),
        ("SGD(lr=nan)", "lr='nan' is not a number"),
        ("Adam(lr=1, betas=(0.9, x))", "betas='x' is not a number"),
        ("Sgd(lr=0.7)", "there is no optimizer 'Sgd'; choose from: ASGD"),
        ("LBFGS(lr=0.7)", "there is no optimizer 'LBFGS'"),
        ("Add(lr=1)", "there is no optimizer 'Add'"),
        ("os.system(lr=1)", "write it as in Python"),
        ("SGD(lr=1)" + " " * 500 + "x", "write it as in Python"),
    ],
)
def test_what_is_wrong_is_said(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_outer(text)


def test_it_needs_local_steps() -> None:
    assert outer_of(JobConfig()) is None
    assert outer_of(JobConfig(sync_every=4, outer="SGD(lr=1)")) == Rule("SGD", lr=1)
    with pytest.raises(ConfigError, match=r"--outer 'SGD\(lr=1\)' needs --sync-every H"):
        check_settings(JobConfig(outer="SGD(lr=1)"))
    for policy in ("sync", "bounded:2", "async"):
        check_settings(JobConfig(outer="SGD(lr=1)", sync_every=4, policy=policy))
