"""The metadata in files of a shared cache: what is written is read, and what is forged is refused or harmless."""

import contextlib
import gzip
import io
import json
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cachedfs.cache.block_store import BlockStore
from cachedfs.shared import metadata_rows
from cachedfs.shared.metadata_rows import DamagedFile, MetadataImport, decoded_rows, infos_in


def test_a_row_that_is_too_long_is_refused_before_decoding(monkeypatch):
    # 33 kB compressed, 33 MB of text, 900 MB decoded.
    data = gzip.compress(b"[" + b"[]," * (11 << 20) + b"[]]\n")
    monkeypatch.setattr(json, "loads", None)
    with pytest.raises(DamagedFile, match="too long"):
        list(decoded_rows(io.BytesIO(data)))


@pytest.fixture
def metadata(tmp_path):
    cache = BlockStore(str(tmp_path / "cache"), explicit=True)
    yield cache.metadata
    cache.close()


def test_details_that_are_nested_too_deeply_are_refused(metadata):
    details = {}
    for _ in range(300):  # json accepts more, but a later reader is deeper in calls
        details = {"a": [details]}
    deep = json.dumps(["file", 1, "x", None, details])
    with pytest.raises(DamagedFile, match="is invalid"):
        MetadataImport(metadata, "gs||", float).take(iter([["object", "b/k", 1.0, deep]]))


@pytest.mark.parametrize("is_too_large", [False, True])
def test_a_listing_that_is_too_large_for_memory_is_not_imported(metadata, monkeypatch, is_too_large):
    monkeypatch.setattr(metadata_rows, "_MAX_LISTING", 4000)
    now = time.time()
    info = json.dumps(["file", 1, "x", None, {"many": [0] * 30 if is_too_large else []}])
    children = [["child", f"b/{i}", info] for i in range(3)]
    MetadataImport(metadata, "gs||", float).take(
        iter([["listing", "b", now, 3], *children, ["object", "c/k", now, info]])
    )
    assert metadata.lookup("gs||", "c/k").info.size == 1
    assert (metadata.listing("gs||", "b") is None) is is_too_large


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
TEXTS = st.sampled_from(["a", "a/b", "a/\udcff", ""]) | st.text(max_size=4)
TIMES = st.sampled_from([1.0, 10**400, True]) | JSON
INFOS = JSON.map(json.dumps) | st.sampled_from(['["file",1,"x",null,{}]', '["file",1,"x","\\udcff",{}]'])
ROWS = st.lists(
    JSON
    | st.tuples(st.sampled_from(["listing", "child", "object"]), JSON, JSON, JSON)
    | st.tuples(st.just("listing"), TEXTS, TIMES, st.integers(-1, 2) | st.just(10**400))
    | st.tuples(st.just("child"), TEXTS, INFOS)
    | st.tuples(st.just("object"), TEXTS, TIMES, INFOS),
    max_size=4,
)


@given(ROWS)
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_arbitrary_rows_are_refused_or_harmless(metadata, rows):
    with contextlib.suppress(DamagedFile):
        MetadataImport(metadata, "gs||", float).take(iter(json.loads(json.dumps(rows))))
    with contextlib.suppress(DamagedFile):
        list(infos_in(json.loads(json.dumps(rows))))
