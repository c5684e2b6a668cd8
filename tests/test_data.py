"""Text to batches: the order is the seed's, and no label crosses documents."""

import numpy as np
import pytest

import jaxcp
from models import data

DOCUMENTS = [b"first document", b"2", b"the third is longer than a row of ten symbols"]


def test_documents_are_joined_and_cut():
    rows = data.pack(DOCUMENTS, 10, seed=0).rows
    stream = [x for document in DOCUMENTS for x in (data.SEPARATOR, *document)]
    np.testing.assert_array_equal(rows.ravel(), stream[: rows.size])
    assert rows.shape == (len(stream) // 10, 10)


@pytest.mark.parametrize("layout", [jaxcp.Contiguous(8), jaxcp.Zigzag(4), jaxcp.Striped(2)], ids=repr)
def test_a_batch_depends_on_seed_and_step_alone(layout):
    documents = [bytes(np.random.default_rng(i).integers(0, 256, 50 * i)) for i in range(1, 9)]
    plain, dealt = data.pack(documents, 32, seed=3), data.pack(documents, 32, seed=3)
    for step in (5, 0):  # in any order
        one, other = plain.batch(step, 4, jaxcp.Contiguous(1)), layout.undeal(dealt.batch(step, 4, layout))
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])
    assert (data.pack(documents, 32, seed=4).batch(0, 4, layout)["inputs"] != dealt.batch(0, 4, layout)["inputs"]).any()


def test_an_epoch_holds_every_row_once():
    rows = data.Rows(np.arange(21, dtype=np.uint16)[:, None], seed=0)
    batches = [rows.batch(step, 3, jaxcp.Contiguous(1))["inputs"].ravel() for step in range(14)]
    first, second = np.concatenate(batches[:7]), np.concatenate(batches[7:])
    assert sorted(first) == sorted(second) == list(range(21))
    assert list(first) != list(second)


def test_no_label_crosses_documents():
    batch = data.pack(DOCUMENTS, 63, seed=0).batch(0, 1, jaxcp.Contiguous(1))
    inputs, targets, positions, segments, weights = (
        batch[name][0] for name in ("inputs", "targets", "positions", "segment_ids", "loss_weights")
    )
    starts = np.flatnonzero(inputs == data.SEPARATOR)
    lengths = [1 + len(document) for document in DOCUMENTS]
    np.testing.assert_array_equal(segments, np.repeat([1, 2, 3], lengths))
    np.testing.assert_array_equal(positions, np.concatenate([np.arange(n) for n in lengths]))
    np.testing.assert_array_equal(np.flatnonzero(weights == 0), [*(starts[1:] - 1), 62])  # each document's last
    labelled = np.flatnonzero(weights)
    np.testing.assert_array_equal(targets[labelled], inputs[labelled + 1])
    assert data.SEPARATOR not in targets


def test_default_text():
    documents = data.read()
    assert sum(map(len, documents)) > 1_000_000
    assert any(b"def namedtuple(" in document for document in documents)
    assert not any(b"import unittest\nfrom test import support" in document for document in documents)
    assert documents == data.read()


def test_files_and_folders(tmp_path):
    for name, text in {"b.txt": b"b", "a/c.py": b"c", ".git/config": b"hidden", "d.png": b"\0", "empty": b""}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text)
    assert data.read([str(tmp_path)]) == [b"c", b"b"]
    assert data.read([str(tmp_path / "d.png"), str(tmp_path / "a")]) == [b"\0", b"c"]


def test_mistakes_get_a_sentence(tmp_path):
    (tmp_path / "empty").touch()
    (tmp_path / "short").write_text("a few words")
    with pytest.raises(ValueError, match=r"--text .*/absent: cannot be read \(No such file or directory\)"):
        data.read([str(tmp_path / "absent")])
    with pytest.raises(ValueError, match=r"--text .*/empty: there is no text in it"):
        data.read([str(tmp_path / "empty")])
    with pytest.raises(ValueError, match=r"12 symbols, less than a row of --seq-len 64"):
        data.pack(data.read([str(tmp_path / "short")]), 64, seed=0)
