"""Options: accepted values, their meaning, and error messages."""

import math
import pickle

import pytest

from cachedfs.config import Config, parse_size


@pytest.mark.parametrize(
    ("text", "value"),
    [(0, 0), (8388608, 8388608), ("8MiB", 8 << 20), ("200GB", 200 * 10**9), ("1.5 kB", 1500), ("64 KiB", 65536),
     ("10%", 0.1), ("100 %", 1.0), ("7", 7)],
)  # fmt: skip
def test_sizes_are_bytes_or_a_share_of_the_disk(text, value):
    assert parse_size(text) == value
    assert type(parse_size(text)) is type(value)


@pytest.mark.parametrize("text", ["", "much", "-1", -1, "8 apples", "101%", None, True, "1e6"])
def test_invalid_sizes_are_refused(text):
    with pytest.raises(ValueError):
        parse_size(text)


def test_arguments_override_the_configuration_and_text_is_parsed():
    assert Config.resolve({"concurrency": "auto", "cache_size": "auto"}) == Config.resolve({}) == Config()
    given = {"max_age": "immutable", "cache_size": "auto", "cache_dir": "/a"}
    defaults = {
        "max_age": "5",
        "concurrency": "4",
        "offline": "false",
        "stale_if_error": "0",
        "target_options": {},
    }
    config = Config.resolve(given, defaults)
    assert config == Config(
        ("/a",), None, max_age=math.inf, concurrency=4, offline=False, stale_if_error=False
    )


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"max_agee": 1}, "did you mean 'max_age'"),
        ({"cachesize": 1}, "did you mean 'cache_size'"),
        ({"cache_storage": "/tmp/c"}, "did you mean 'cache_dir'"),
        ({"concurrency": 1.5}, "concurrency=1.5: expected a whole number"),
        ({"zzz": 1}, "the options are cache_dir"),
        ({"token": "anon"}, "gs=\\{'token'"), ({"anon": True}, "'anon'; the options are .*gs=\\{'anon'"),
        ({"block_size": "1MB"}, "block_size='1MB'.*multiple of 64 KiB"),
        ({"block_size": 4096}, "at least 65536"),
        ({"cache_size": "big"}, "cache_size='big'.*'200GB'"),
        ({"max_age": -1}, "max_age=-1.*immutable"),
        ({"max_age": float("nan")}, "max_age=nan"),
        ({"concurrency": 0}, "at least 1"),
        ({"offline": "maybe"}, "True or False"),
        ({"read_ahead": "10%"}, "read_ahead='10%'"),
        ({"cache_dir": []}, "a directory, or a list"),
        ({"cache_dir": 7}, "cache_dir=7"),
    ],
)  # fmt: skip
def test_an_invalid_value_is_an_error_with_the_accepted_ones(option, message):
    with pytest.raises(ValueError, match=message):
        Config.resolve(option)


def test_cache_dir_is_one_directory_or_a_list(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    assert Config.resolve({"cache_dir": tmp_path}).cache_dir == (str(tmp_path),)
    assert Config.resolve({"cache_dir": ["~/a", tmp_path]}).cache_dir == ("/home/somebody/a", str(tmp_path))


def test_configs_are_compared_by_value():
    config = Config.resolve({"max_age": 1, "offline": True})
    assert config.lifetime_s == math.inf
    assert pickle.loads(pickle.dumps(config)) == config
    assert hash(config) == hash(Config.resolve({"max_age": "1", "offline": "true"}))
