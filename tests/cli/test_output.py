"""What is printed: names that a terminal would obey, log messages and warnings."""

import logging
import re
import warnings

from cachedfs.cli import output
from tests.cli.helpers import in_terminal, run

HOSTILE = "a\x1b]0;owned\x07\x9b31m\u202e b"
SHOWN = r"a\x1b]0;owned\x07\x9b31m\u202e b"


def test_names_are_escaped_on_a_terminal(cloud):
    cloud.put(f"a/{HOSTILE}", b"1")
    above = cloud.url("a", "gs://")
    name = f"{above}/{HOSTILE}"
    for line in (["ls", above], ["ls", "-l", above], ["pin", name], ["stats"], ["cat", f"{name}.x"]):
        seen = in_terminal("--debug", *line, COLUMNS="200")
        assert SHOWN in seen, seen
        assert not set("\x1b\x07\x9b\u202e") & set(seen)


def test_names_in_a_pipe_are_as_they_are(cloud):
    cloud.put(f"a/{HOSTILE}", b"1")
    assert run("ls", cloud.url("a", "gs://")).stdout == f"{cloud.url('a', 'gs://')}/{HOSTILE}\n"
    assert HOSTILE in run("cat", cloud.url(f"{HOSTILE}x", "gs://"), status=1).stderr


def test_only_what_cannot_be_seen_is_escaped():
    seen = "naïve 日本語\u3000\u00a0 👨\u200d👩 می\u200cخواهم \\ '"
    assert output.escaped(seen) == seen
    assert output.escaped("\t\r\n\x00\x7f\udc80\u2028") == r"\t\r\n\x00\x7f\udc80\u2028"


def test_log_and_warnings_are_single_lines(capsys):
    with output.log_in_lines(debug=False):
        logging.getLogger("cachedfs.core").warning("the %s is away", "origin")
        logging.getLogger("cachedfs.core").info("nobody needs this")
        warnings.simplefilter("always")
        warnings.warn("this is old", DeprecationWarning, stacklevel=1)
    assert (
        capsys.readouterr().err == "cachedfs: warning: the origin is away\ncachedfs: warning: this is old\n"
    )


def test_trouble_with_the_cache_is_a_line_and_no_failure(cloud, tmp_path):
    cloud.put("key", b"data")
    (tmp_path / "file").touch()
    result = run("cat", "--cache-dir", str(tmp_path / "file"), cloud.url("key", "gs://"))
    assert result.stdout == "data"
    assert re.fullmatch(r"cachedfs: warning: blocks are not cached: .*\n", result.stderr)
