"""Pages of keys: those of a bucket that is sorted, grouped and cut as S3 does it."""

import hypothesis
import hypothesis.strategies as st
import pytest

from cachedfs.common.types import ObjectInfo
from cachedfs.server.key_pages import page_of, table_of

KEYS = st.lists(st.text("ab/c\U0010ffff\ue000\U00010000", min_size=1, max_size=6), unique=True, max_size=30)
PAGE = {"prefix": "", "delimiter": "", "after": "", "most": 1000}


def listed(keys, prefix, delimiter):
    """Return what S3 lists, in the slow way."""
    found = set()
    for key in keys:
        head, rest = key[: len(prefix)], key[len(prefix) :]
        if head == prefix:
            name, mark, _ = rest.partition(delimiter) if delimiter else (rest, "", "")
            found.add(prefix + name + mark)
    return sorted(found, key=str.encode)


def paged(keys, prefix, delimiter, most):
    """Return what all pages have, and check each."""
    found, after = [], ""
    while True:
        page = page_of(keys, prefix=prefix, delimiter=delimiter, after=after, most=most)
        names = sorted([*(keys[row] for row in page.rows), *page.groups])
        assert len(names) == most if page.is_truncated else len(names) <= most
        found += names
        if not page.is_truncated:
            return found
        after = page.last
        assert after == names[-1]


@hypothesis.given(
    KEYS, st.text("ab/", max_size=3), st.sampled_from(["", "/", "b", "//", "\U0010ffff"]), st.integers(1, 4)
)
def test_pages_have_each_name_once_in_the_byte_order_of_utf_8(keys, prefix, delimiter, most):
    assert paged(sorted(keys), prefix, delimiter, most) == listed(keys, prefix, delimiter)


@hypothesis.given(KEYS, st.text("ab/c", max_size=4))
def test_start_after(keys, after):
    keys = sorted(keys)
    page = page_of(keys, **{**PAGE, "after": after})
    assert [keys[row] for row in page.rows] == [key for key in keys if key > after or not after]


class Counted(list):
    """Counts the keys that are looked at."""

    n = 0

    def __getitem__(self, index):
        Counted.n += 1
        return super().__getitem__(index)


def test_a_page_of_many_keys_looks_at_few():
    keys = Counted(f"{number:07}/{part}" for number in range(50_000) for part in "ab")
    page = page_of(keys, **{**PAGE, "after": "0040000/a"})
    assert page.is_truncated
    assert (keys[page.rows[0]], len(page.rows)) == ("0040000/b", 1000)
    assert Counted.n < 4 * 1000


@pytest.mark.parametrize("with_folders", [False, True])
def test_a_table_has_what_has_a_size(with_folders):
    infos = [
        ObjectInfo("b/top/a.txt", "file", 1, "1", details={"mtime": 5.0}),
        ObjectInfo("b/top/a", "directory", 0),
        ObjectInfo("b/top/document", "file", None, None),
        ObjectInfo("b/top/z/", "file", 0, "2"),
        ObjectInfo("b/top", "file", 3, "3"),
        ObjectInfo("b/top/", "file", 0, "4"),
    ]
    table = table_of(infos, "b/top/", with_folders=with_folders)
    assert table.keys == ["a.txt", *(["a/"] if with_folders else []), "z/"]
    assert (table.sizes[0], table.times[0], table.fingerprints[0]) == (1, 5.0, "1")
