"""The characters of a text: counted as the standard has it, each once, in an order that can be resumed."""

import functools
import hashlib
import http.server
import logging
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from flowattn.data.corpus import CharCorpus, CharLoader
from flowattn.data.download import DownloadError, download
from flowattn.data.text import PENN_TREEBANK, decode, encode, fetch_penn_treebank
from flowattn.data.windows import NOTHING

LINES = {
    "train": [" pierre <unk> N years old ", " mr. <unk> is chairman ", " no it was n't black monday "] * 9,
    "valid": [" consumers may want to move ", " N N "],
    "test": [" no it was n't ", " old ", f" {'n' * 288} ", f" {'n' * 289} "],
}


@pytest.fixture
def folder(tmp_path):
    for name, lines in LINES.items():
        (tmp_path / f"ptb.{name}.txt").write_text("".join(line + "\n" for line in lines))
    return tmp_path


@pytest.fixture
def corpus(folder):
    return functools.partial(CharCorpus, folder, cache=folder / "cache", batch_size=2, max_tokens=8)


def characters(name):
    return "".join(line.strip(" ") + "\n" for line in LINES[name])


def read(loader):
    """All batches as lists of what each text predicts."""
    return [[row[row != NOTHING].tolist() for row in batch.targets] for batch in loader]


# -- what is counted


def test_a_line_is_counted_without_its_outer_spaces_and_with_its_end(corpus):
    data = corpus()
    assert data.num_characters("val") == len(characters("valid")) == len("consumers may want to move\nN N\n")


def test_unk_is_five_characters(corpus):
    data = corpus()
    text = data.decode(torch.from_numpy(np.array(data.split("train").symbols[:20])))
    assert text.startswith("pierre <unk> N years")


@pytest.mark.skipif("FLOWATTN_PTB" not in os.environ, reason="FLOWATTN_PTB names no folder of the Penn Treebank")
def test_the_penn_treebank_has_the_standard_counts(tmp_path):
    folder = Path(os.environ["FLOWATTN_PTB"])
    for name, sha256, _ in PENN_TREEBANK.values():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == sha256
    for overlap in (0, 37):
        data = CharCorpus(folder, cache=tmp_path, eval_batch_size=512, overlap=overlap)
        assert len(data.alphabet) == 50
        for name, (_, _, count) in PENN_TREEBANK.items():
            assert data.num_characters(name) == count
            if name != "train":
                loader = data.val_dataloader() if name == "val" else data.test_dataloader()
                assert sum(int((batch.targets != NOTHING).sum()) for batch in loader) == count
    lines = CharCorpus(folder, cache=tmp_path, mode="lines", max_tokens=289).split("test")
    assert (lines.num_left_out, len(lines)) == (26, 3761 - 26)


def test_other_counts_than_the_standard_are_told(corpus, caplog):
    with caplog.at_level(logging.WARNING):
        corpus().setup()
    assert "where the Penn Treebank has 393,042" in caplog.text


@pytest.mark.parametrize("overlap", [0, 3, 7])
def test_evaluation_predicts_every_character_once_in_order(corpus, overlap):
    data = corpus(overlap=overlap)
    for name, loader in (("valid", data.val_dataloader()), ("test", data.test_dataloader())):
        found = [symbol for batch in read(loader) for row in batch for symbol in row]
        assert decode(found, data.alphabet) == characters(name)


@pytest.mark.parametrize("overlap", [0, 3])
def test_inputs_are_the_characters_before_their_targets(corpus, overlap):
    data = corpus(overlap=overlap)
    end = data.alphabet.index("\n")
    stream = [end, *encode(characters("test"), data.alphabet).tolist()]
    for batch in data.test_dataloader():
        for start, inputs, targets in zip(batch.index.tolist(), batch.inputs, batch.targets, strict=True):
            count = int((targets != NOTHING).nonzero().max()) + 1
            assert inputs[:count].tolist() == stream[start : start + count]
            expected = stream[start + 1 : start + 1 + count]
            assert all(t in (NOTHING, e) for t, e in zip(targets.tolist()[:count], expected, strict=True))
            assert (start == 0) or (targets[:overlap] == NOTHING).all()


def test_training_windows_follow_the_text_and_move_from_epoch_to_epoch(corpus):
    data = corpus()
    text = characters("train")
    loader, starts = data.train_dataloader(), []
    for epoch in range(3):
        loader.set_epoch(epoch)
        mine = []
        for batch in loader:
            for start, inputs, targets in zip(
                *map(torch.Tensor.tolist, (batch.index, batch.inputs, batch.targets)), strict=True
            ):
                assert decode(targets, data.alphabet) == text[start : start + 8]
                assert decode(inputs, data.alphabet) == (text[start - 1 : start + 7] if start else "\n" + text[:7])
                mine.append(start)
        assert len({start % 8 for start in mine}) == 1 and len(set(mine)) == len(mine)
        starts.append(mine)
    assert len({mine[0] % 8 for mine in starts}) > 1


def test_lines_are_apart_and_long_ones_left_out(corpus, caplog):
    data = corpus(mode="lines", max_tokens=289)
    with caplog.at_level(logging.INFO):
        rows = [decode(row, data.alphabet) for batch in read(data.test_dataloader()) for row in batch]
    assert rows == ["no it was n't\n", "old\n", "n" * 288 + "\n"]
    assert "1 of 4 lines of test are over 288 characters and left out" in caplog.text
    batch = next(iter(data.test_dataloader()))
    assert (batch.inputs[:, 0] == data.alphabet.index("\n")).all()
    assert batch.targets.shape == (2, 14)


# -- order


def test_the_order_is_a_function_of_seed_and_epoch_alone(corpus):
    def order(seed, epoch):
        loader = corpus(seed=seed).train_dataloader()
        loader.set_epoch(epoch)
        return [batch.index.tolist() for batch in loader]

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(0, 1) != order(1, 1)


def test_an_epoch_goes_on_where_it_was_stopped(corpus):
    loader = corpus().train_dataloader()
    loader.set_epoch(5)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    state = loader.state_dict()
    rest = [batch.targets.tolist() for batch in batches]
    other = corpus().train_dataloader()
    other.load_state_dict(state)
    assert [batch.targets.tolist() for batch in other] == rest != []


def test_ranks_share_the_texts_without_repeating_any(corpus):
    data = corpus()
    split = data.split("test")
    parts = [CharLoader(split, 2, rank=rank, num_ranks=3) for rank in range(3)]
    starts = sorted(start for part in parts for batch in part for start in batch.index.tolist())
    assert starts == [k * 8 for k in range(len(split))]


# -- where texts come from


def test_any_text_file_is_cut_into_three(tmp_path):
    path = tmp_path / "poem.txt"
    path.write_text("ab\u00e9\n" * 100, encoding="utf-8")
    data = CharCorpus(path, cache=tmp_path, max_tokens=4, batch_size=1)
    assert data.alphabet == "\nab\u00e9"
    assert [data.num_characters(name) for name in ("train", "val", "test")] == [360, 20, 20]


def test_a_text_file_is_not_taken_for_the_folder_of_a_download(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("abc\n" * 100)
    data = CharCorpus(path, download=True, url="file:///nowhere", cache=tmp_path, max_tokens=4, batch_size=1)
    data.prepare_data()
    assert data.num_characters("train") == 360


def test_without_a_path_the_text_is_pythons_documentation(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        data = CharCorpus(cache=tmp_path)
        assert len(data.alphabet) == 50
    assert data.alphabet == data.alphabet.lower()
    assert "other versions have other texts" in caplog.text
    assert data.num_characters("train") > 100_000


def test_symbols_are_written_once_and_mapped(corpus, folder):
    data = corpus()
    data.setup()
    files = sorted((folder / "cache").rglob("*.npy"))
    assert len(files) == 3 and not list((folder / "cache").rglob("*.part"))
    before = [file.stat().st_mtime_ns for file in files]
    assert isinstance(data.split("train").symbols, np.memmap)
    corpus().setup()
    assert [file.stat().st_mtime_ns for file in files] == before


def test_a_text_that_changed_is_read_anew(corpus, folder):
    assert "z" not in corpus().alphabet
    (folder / "ptb.train.txt").write_text(" zebra \n" * 9)
    assert "z" in corpus().alphabet


def test_writing_that_was_cut_short_is_done_again(corpus, folder):
    corpus().setup()
    (about,) = (folder / "cache").rglob("alphabet.json")
    about.unlink()
    next((folder / "cache").rglob("train.npy")).write_bytes(b"half")
    assert corpus().num_characters("train") == len(characters("train"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be a whole number"),
        ({"overlap": 8}, "overlap must be at least 0 and below max_tokens=8; got overlap=8"),
        ({"mode": "words"}, "mode must be one of 'stream', 'lines'"),
        ({"mode": "lines", "max_tokens": 300}, "at most 289"),
        ({"seed": -1}, "seed must be a whole number"),
    ],
)
def test_wrong_options_are_refused(corpus, options, message):
    with pytest.raises(ValueError, match=message):
        corpus(**options)


def test_a_missing_file_is_named(tmp_path, folder):
    with pytest.raises(FileNotFoundError, match=r"there is no .*nowhere"):
        CharCorpus(tmp_path / "nowhere", cache=tmp_path).setup()
    (folder / "ptb.test.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"there is no .*ptb\.test\.txt"):
        CharCorpus(folder, cache=tmp_path).setup()


def test_texts_that_cannot_be_used_are_refused(tmp_path):
    for name, content, message in (
        ("binary", b"\xff\xfe\x00", "must be a text in UTF-8"),
        ("many", "".join(map(chr, range(400, 800))).encode(), "at most 256 different characters"),
        ("short", b"ab", "is empty"),
    ):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            CharCorpus(path, cache=tmp_path).setup()
    for name in LINES:
        (tmp_path / f"ptb.{name}.txt").write_text("".join(map(chr, range(400, 800))))
    with pytest.raises(ValueError, match=r"at most 256 different characters; .* has 401\."):
        CharCorpus(tmp_path, cache=tmp_path).setup()
    with pytest.raises(ValueError, match="'!' at position 2 is not in the alphabet"):
        encode("ab!", "ab")


# -- download


@pytest.fixture
def served(folder):
    """The folder behind an address, by HTTP."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    handler.func.log_message = lambda *_: None
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_download_is_checked_and_not_repeated(served, folder, tmp_path):
    sha256 = hashlib.sha256((folder / "ptb.test.txt").read_bytes()).hexdigest()
    target = tmp_path / "new" / "file.txt"
    assert download(f"{served}/ptb.test.txt", target, sha256).read_bytes() == (folder / "ptb.test.txt").read_bytes()
    assert download("http://127.0.0.1:1/nothing", target, sha256) == target


def test_a_wrong_file_is_not_kept(folder, tmp_path):
    target = tmp_path / "new" / "file.txt"
    with pytest.raises(DownloadError, match="gave another file than expected"):
        download((folder / "ptb.test.txt").as_uri(), target, "0" * 64)
    assert list(target.parent.iterdir()) == []
    target.write_text("mine")
    with pytest.raises(DownloadError, match="is not the file it should be"):
        download((folder / "ptb.test.txt").as_uri(), target, "0" * 64)
    assert target.read_text() == "mine"


def test_a_failed_download_says_what_to_do(served, tmp_path):
    with pytest.raises(DownloadError, match=r"could not be fetched: .*Get the file by other means and put it at"):
        download(f"{served}/missing.txt", tmp_path / "x.txt", "0" * 64)
    assert not (tmp_path / "x.txt").exists()


def test_the_treebank_of_a_mirror_must_be_the_treebank(served, tmp_path):
    with pytest.raises(DownloadError, match="gave another file than expected"):
        fetch_penn_treebank(tmp_path / "ptb", served)
    with pytest.raises(ValueError, match="download=True needs a path"):
        CharCorpus(download=True)
