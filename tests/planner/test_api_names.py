"""One thing has one name: options are called the same in `plan`, in the decorator and on the command line."""

import importlib
import inspect
import pkgutil

import pytest

import shardwright
import shardwright.planner
from shardwright.planner.api import plan
from shardwright.planner.decorator import parallelize

MODULES = sorted(module.name for module in pkgutil.iter_modules(shardwright.planner.__path__))


@pytest.mark.parametrize("name", MODULES)
def test_what_a_module_offers_is_there_and_its_own(name: str) -> None:
    module = importlib.import_module(f"shardwright.planner.{name}")
    offered = module.__all__ if hasattr(module, "__all__") else []
    assert all(hasattr(module, one) for one in offered)
    assert not [one for one in offered if one.startswith("_")]


def test_the_decorator_takes_the_options_of_plan_by_their_names() -> None:
    shared = {"cluster", "budget", "host", "optimizer", "loss", "loss_fn", "outputs", "time_limit"}
    for function in (plan, parallelize):
        found = inspect.signature(function).parameters
        assert shared <= found.keys()
        assert all(found[name].kind is inspect.Parameter.KEYWORD_ONLY for name in shared)
    kinds = {name: inspect.signature(plan).parameters[name].annotation for name in ("optimizer", "outputs")}
    assert kinds == {name: inspect.signature(parallelize).parameters[name].annotation for name in kinds}


def test_public_functions_say_what_they_do() -> None:
    for name in shardwright.__all__:
        assert (getattr(shardwright, name).__doc__ or "").strip(), name
