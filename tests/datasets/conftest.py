"""Fixtures of the dataset tests."""

import multiprocessing
import warnings

import pytest


@pytest.fixture
def forking():
    """Return the context of forked processes, without the warnings of newer Pythons."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
        yield multiprocessing.get_context("fork")


@pytest.fixture
def spawned_options(cloud):
    """Return the storage options of a spawned process, which has not the configuration of this one."""
    return {**cloud.options, "cachedfs": {"cache_dir": str(cloud.cache_dir), "keep_free": 0}}
