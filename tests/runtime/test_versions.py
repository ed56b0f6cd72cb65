"""A plan made with other releases is used, with one warning that names them."""

import warnings

import pytest

from shardwright.ir import Budget, Decisions, Identity, Mesh, Plan, Prediction
from shardwright.runtime.versions import installed_versions, warn_of_other_versions


def plan(*versions: tuple[str, str]) -> Plan:
    identity = Identity("sha256:0", "train", "", "adamw", "float32", 0, 1, ())
    nothing = Decisions(Mesh((), ()), {}, {})
    return Plan("t", identity, "cpu:1", Budget(1, 0), nothing, Prediction(0.0, 0.0, 0, 0), None, (), versions)


def test_other_versions_are_named_once() -> None:
    python = ("python", dict(installed_versions())["python"])
    with pytest.warns(UserWarning, match="torch 1.0, here 2") as caught:
        warn_of_other_versions(plan(("torch", "1.0"), python))
    assert len(caught) == 1 and "python" not in str(caught[0].message)


def test_the_same_versions_are_silent() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_other_versions(plan(*installed_versions()))
