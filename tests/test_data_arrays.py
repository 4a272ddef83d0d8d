"""The user's own files: what they hold is what comes out, and bad ones get an error that says where."""

import csv
import re
import sys

import numpy as np
import pytest
import torch

from flowattn.context import split_context
from flowattn.data.arrays import ArraySequences

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

LENGTHS = [3, 1, 4, 2, 4, 2, 3, 1, 2, 4]


def values(sequences=10, tokens=4, features=2):
    return np.random.default_rng(0).normal(size=(sequences, tokens, features))


def mask_of_lengths():
    return np.arange(4) < np.array(LENGTHS)[:, None]


def columns():
    """A table of the sequences in `values` with `LENGTHS`: ids, two features, one context."""
    mask = mask_of_lengths()
    ids = [f"s{row}" for row in np.nonzero(mask)[0]]
    x, y = values()[mask].T
    return {"id": ids, "x": x.tolist(), "y": y.tolist(), "angle": np.arange(float(len(x))).tolist()}


def write_csv(path, table):
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(table)
        writer.writerows(zip(*table.values(), strict=True))


def write_parquet(path, table):
    parquet.write_table(pa.table(table), path)


WRITE = {".csv": write_csv, ".parquet": write_parquet}
each_table = pytest.mark.parametrize("suffix", WRITE)


def everything(data):
    """All inputs and masks of all splits, in the order of their first value."""
    inputs = torch.cat([data.split(name).inputs for name in ("train", "val", "test")])
    masks = [data.split(name).mask for name in ("train", "val", "test")]
    order = inputs[:, 0, 0].argsort()
    return inputs[order], None if masks[0] is None else torch.cat(masks)[order]


def check_contents(data, inputs, mask):
    got, got_mask = everything(data)
    order = inputs[:, 0, 0].argsort()
    kept = inputs if mask is None else np.where(mask[..., None], inputs, 0)
    np.testing.assert_allclose(got, kept[order], rtol=1e-6)
    assert (got_mask is None) == (mask is None)
    if mask is not None:
        assert (got_mask.numpy() == mask[order]).all()


def test_npy_is_read_whole(tmp_path):
    np.save(tmp_path / "a.npy", values())
    data = ArraySequences(str(tmp_path / "a.npy"))
    assert data.event_shape == (4, 2)
    assert data.context_features is None
    check_contents(data, values(), None)
    assert [len(data.split(name)) for name in ("train", "val", "test")] == [8, 1, 1]


def test_npz_is_read_with_mask_and_context(tmp_path):
    inputs, mask = values(), mask_of_lengths()
    inputs[~mask] = np.nan
    context = np.arange(30.0).reshape(10, 3)
    np.savez(tmp_path / "a.npz", inputs=inputs, mask=mask, context=context)
    data = ArraySequences(str(tmp_path / "a.npz"), seed=3)
    assert (data.event_shape, data.context_features) == ((4, 2), 3)
    check_contents(data, inputs, mask)
    batch = data.split("train").all()
    features, got_mask = split_context(batch.context, batch.inputs)
    row = int(np.abs(values()[:, 0, 0] - batch.inputs[0, 0, 0].item()).argmin())
    assert features[0, 0].tolist() == context[row].tolist()
    assert got_mask[0].tolist() == mask[row].tolist()


@each_table
def test_tables_are_read_by_their_ids(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    WRITE[suffix](path, columns())
    data = ArraySequences(str(path), sequence_column="id", context_columns=["angle"])
    assert (data.event_shape, data.context_features) == ((4, 2), 1)
    check_contents(data, values(), mask_of_lengths())


@each_table
def test_tables_are_cut_into_equal_lengths(tmp_path, suffix):
    x, y = values().reshape(-1, 2).T
    path = tmp_path / f"a{suffix}"
    WRITE[suffix](path, {"y": y.tolist(), "x": x.tolist()})
    data = ArraySequences(str(path), length=4, feature_columns=["x", "y"])
    assert data.event_shape == (4, 2)
    check_contents(data, values(), None)


def test_the_shape_is_known_before_the_numbers_are_read(tmp_path, monkeypatch):
    np.save(tmp_path / "a.npy", values())
    np.savez(tmp_path / "a.npz", inputs=values(), context=np.zeros((10, 5)))
    monkeypatch.setattr(np, "load", None)
    assert ArraySequences(str(tmp_path / "a.npy")).event_shape == (4, 2)
    assert ArraySequences(str(tmp_path / "a.npz")).context_features == 5


def test_the_seed_shares_sequences_out(tmp_path):
    np.save(tmp_path / "a.npy", values(100))
    first, again, other = (ArraySequences(str(tmp_path / "a.npy"), seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first.split("test").inputs, again.split("test").inputs)
    assert not torch.equal(first.split("test").inputs, other.split("test").inputs)


def test_predictions_are_of_every_row_in_the_order_of_the_file(tmp_path):
    inputs, mask = values(20), np.arange(4) < np.array(LENGTHS * 2)[:, None]
    np.savez(tmp_path / "a.npz", inputs=inputs, mask=mask, context=np.arange(20.0)[:, None])
    data = ArraySequences(str(tmp_path / "a.npz"), predict_split="all", batch_size=8)
    batches = list(data.predict_dataloader())
    assert torch.cat([batch.index for batch in batches]).tolist() == list(range(20))
    got = torch.cat([batch.inputs for batch in batches])
    np.testing.assert_allclose(got, np.where(mask[..., None], inputs, 0), rtol=1e-6)
    features = torch.cat([split_context(batch.context, batch.inputs)[0] for batch in batches])
    assert features[:, 0, 0].tolist() == list(range(20))
    assert (data.whole().mask.numpy() == mask).all()


def test_a_sequence_is_known_by_its_row_of_the_file_in_every_split(tmp_path):
    np.save(tmp_path / "a.npy", values(20))
    data = ArraySequences(str(tmp_path / "a.npy"), batch_size=3)
    for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader(), data.predict_dataloader()):
        for batch in loader:
            np.testing.assert_allclose(batch.inputs, values(20)[batch.index], rtol=1e-6)


def test_fractions_that_leave_nothing_to_train_on_are_named(tmp_path):
    np.save(tmp_path / "a.npy", values(20))
    message = (
        "must leave a sequence to train on of the 20 in .*; got val_fraction=0.005, which is 1 of them, and "
        "test_fraction=0.99, which is 20."
    )
    with pytest.raises(ValueError, match=message):
        ArraySequences(str(tmp_path / "a.npy"), val_fraction=0.005, test_fraction=0.99).setup()


def with_value(array, index, value):
    array = array.copy()
    array[index] = value
    return array


INPUTS = values()
BAD_ARRAYS = {
    "NaN": (
        {"inputs": with_value(INPUTS, (3, 1, 0), np.nan)},
        "inputs, sequence 3, token 1, feature 0: must be finite; got nan.",
    ),
    "infinity": (
        {"inputs": with_value(INPUTS, (0, 2, 1), -np.inf)},
        "inputs, sequence 0, token 2, feature 1: must be finite; got -inf.",
    ),
    "text": ({"inputs": INPUTS.astype(str)}, "inputs: must be numbers; got the type <U"),
    "objects": ({"inputs": INPUTS.astype(object)}, "inputs: must be numbers; got the type object."),
    "complex": ({"inputs": INPUTS + 1j}, "inputs: must be numbers; got the type complex128."),
    "two dimensions": (
        {"inputs": INPUTS[0]},
        "inputs: must have shape [sequences, tokens, features], at least one of each; got [4, 2].",
    ),
    "no sequences": ({"inputs": INPUTS[:0]}, "at least one of each; got [0, 4, 2]."),
    "two sequences": (
        {"inputs": INPUTS[:2]},
        "val_fraction and test_fraction must leave a sequence to train on of the 2 in ",
    ),
    "constant feature": (
        {"inputs": with_value(INPUTS, (..., 1), 7.0)},
        "feature 1 of inputs: is 7.0 in every token and has no density. Leave it out.",
    ),
    "large offset": ({"inputs": INPUTS + 1e9}, "feature 0 of inputs: float32 cannot tell values from"),
    "too large": ({"inputs": INPUTS * 1e300}, "feature 0 of inputs: float32 cannot tell values from"),
    "no inputs": ({"x": INPUTS}, "must hold an array 'inputs' and nothing else but 'mask' and 'context'; got 'x'."),
    "misspelt mask": (
        {"inputs": INPUTS, "masks": mask_of_lengths()},
        "nothing else but 'mask' and 'context'; got 'inputs', 'masks'.",
    ),
    "mask of numbers": (
        {"inputs": INPUTS, "mask": np.ones((10, 4))},
        "mask: must be boolean, True at real tokens; got the type float64.",
    ),
    "mask of another shape": (
        {"inputs": INPUTS, "mask": mask_of_lengths()[:9]},
        "mask: must have shape [sequences, tokens] = [10, 4] as inputs; got [9, 4].",
    ),
    "empty sequence": (
        {"inputs": INPUTS, "mask": with_value(mask_of_lengths(), 6, False)},
        "mask: sequence 6 has no real token.",
    ),
    "context of another length": (
        {"inputs": INPUTS, "context": np.zeros((9, 2))},
        "[sequences, tokens] = [10, 4] as inputs; got [9, 2].",
    ),
    "flat context": ({"inputs": INPUTS, "context": np.zeros(10)}, "[sequences, tokens] = [10, 4] as inputs; got [10]."),
    "NaN in the context": (
        {"inputs": INPUTS, "context": with_value(np.zeros((10, 2)), (4, 1), np.nan)},
        "context, sequence 4, feature 1: must be finite; got nan.",
    ),
}


@pytest.mark.parametrize("arrays, message", BAD_ARRAYS.values(), ids=BAD_ARRAYS)
def test_bad_arrays_are_refused_with_the_place(tmp_path, arrays, message):
    path = tmp_path / "bad.npz"
    np.savez(path, **arrays)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        ArraySequences(str(path)).setup()
    assert str(path) in str(error.value)


def test_a_pickle_in_an_array_is_never_run(tmp_path):
    class Hostile:
        def __reduce__(self):
            return (pytest.fail, ("the pickle was run",))

    array = np.empty((3, 1, 1), dtype=object)
    array[:] = Hostile()
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    with pytest.raises(ValueError, match="must be numbers; got the type object"):
        ArraySequences(str(tmp_path / "a.npy")).setup()


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".parquet"])
def test_a_file_cut_in_half_is_refused(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    arguments = {}
    if suffix == ".parquet":
        write_parquet(path, columns())
        arguments = {"sequence_column": "id"}
    else:
        np.save(path, INPUTS) if suffix == ".npy" else np.savez(path, inputs=INPUTS)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ValueError, match=re.escape(str(path))):
        ArraySequences(str(path), **arguments).setup()


BAD_CSV = {
    "text": ("id,x\na,1\na,two\nb,3\n", "line 3, column 'x': must be a number; got 'two'."),
    "empty cell": ("id,x\na,1\na,\nb,3\n", "line 3, column 'x': must be a number; got ''."),
    "NaN": ("id,x\na,1\n\na,nan\nb,3\n", "line 4, column 'x': must be finite; got nan."),
    "infinity": ("id,x\na,1\na,-inf\nb,3\n", "line 3, column 'x': must be finite; got -inf."),
    "ragged row": ("id,x\na,1\na,2,3\nb,3\n", "line 3: must have 2 columns; got 3."),
    "short row": ("id,x\na,1\nb\n", "line 3: must have 2 columns; got 1."),
    "ids that come back": (
        "id,x\na,1\nb,2\na,3\n",
        "line 4, column 'id': the rows of a sequence must follow one another; got 'a' again, after others.",
    ),
    "no id": ("id,x\na,1\n,2\n", "line 3, column 'id': the sequence must have an id; got ''."),
    "empty file": ("", "is empty: its first line must name the columns."),
    "names only": ("id,x\n", "has no rows below the names of its columns."),
    "no names": ("1,2\n3,4\n", "line 1: must name the columns; got the numbers 1, 2."),
    "semicolons": ("id;x\na;1\n", "line 1: columns must be separated by commas; got 'id;x'."),
    "missing column": ("name,x\na,1\n", "must have a column 'id'; it has 'name', 'x'."),
    "same name twice": ("id,x,x\na,1,1\n", "column 3 must have a name, and one of its own; got 'x'."),
    "nameless column": ("id,x,\na,1,1\n", "column 3 must have a name, and one of its own; got ''."),
    "no features": ("id\na\n", "at least one is a feature; got feature_columns=[]"),
    "constant column": (
        "id,x,y\na,1,0\nb,2,0\nc,3,0\n",
        "column 'y': is 0.0 in every token and has no density. Leave it out.",
    ),
    "time stamps": (
        "id,x\na,1700000000.1\nb,1700000000.2\nc,1700000000.3\n",
        "column 'x': float32 cannot tell values from",
    ),
    "open quotes": ('id,x\na,"1\nb,2\n', "is not comma-separated text in UTF-8: unexpected end of data."),
}


@pytest.mark.parametrize("text, message", BAD_CSV.values(), ids=BAD_CSV)
def test_bad_csv_is_refused_with_line_and_column(tmp_path, text, message):
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        ArraySequences(str(path), sequence_column="id").setup()
    assert str(path) in str(error.value)


def test_text_that_is_not_utf8_is_refused(tmp_path):
    path = tmp_path / "bad.csv"
    path.write_bytes("id,größe\n".encode("latin-1"))
    with pytest.raises(ValueError, match="is not comma-separated text in UTF-8"):
        ArraySequences(str(path), sequence_column="id").setup()


BAD_PARQUET = {
    "null": ({"id": [1, 1, 2], "x": [1.0, None, 2.0]}, "row 1, column 'x': must be a number; got None."),
    "NaN": ({"id": [1, 1, 2], "x": [1.0, 2.0, float("nan")]}, "row 2, column 'x': must be finite; got nan."),
    "text": ({"id": [1, 1, 2], "x": ["1", "b", "3"]}, "row 1, column 'x': must be a number; got 'b'."),
    "lists": ({"id": [1, 1, 2], "x": [[1.0], [2.0], [3.0]]}, "row 0, column 'x': must be a number; got [1.0]."),
    "ids that come back": (
        {"id": [1, 2, 1], "x": [1.0, 2.0, 3.0]},
        "row 2, column 'id': the rows of a sequence must follow one another; got 1 again",
    ),
    "no id": ({"id": [1, None, 2], "x": [1.0, 2.0, 3.0]}, "row 1, column 'id': the sequence must have an id; got "),
}


@pytest.mark.parametrize("table, message", BAD_PARQUET.values(), ids=BAD_PARQUET)
def test_bad_parquet_is_refused_with_row_and_column(tmp_path, table, message):
    path = tmp_path / "bad.parquet"
    write_parquet(path, table)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        ArraySequences(str(path), sequence_column="id").setup()
    assert str(path) in str(error.value)


BAD_ARGUMENTS = {
    "ending": ("a.txt", {}, "path must end in .npy, .npz, .csv, .parquet; got path="),
    "ids of an array": (
        "a.npy",
        {"sequence_column": "id"},
        "sequence_column is for .csv and .parquet; got sequence_column='id'",
    ),
    "neither ids nor length": ("a.csv", {}, "Either sequence_column or length must say where sequences begin"),
    "ids and length": ("a.csv", {"sequence_column": "id", "length": 2}, "Either sequence_column or length"),
    "length of no sequence": ("a.csv", {"length": 0}, "length must be a whole number of at least 1; got length=0."),
    "fractions": (
        "a.npy",
        {"val_fraction": 0.5, "test_fraction": 0.5},
        "leave something to train on; got val_fraction=0.5, test_fraction=0.5.",
    ),
    "length that does not divide": (
        "a.csv",
        {"length": 3, "feature_columns": ["x"]},
        "must have a multiple of length=3 rows; got 26.",
    ),
    "two roles": (
        "a.csv",
        {"sequence_column": "id", "feature_columns": ["x"], "context_columns": ["x"]},
        "every column has one role",
    ),
}


@pytest.mark.parametrize("name, arguments, message", BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS)
def test_bad_arguments_are_refused(tmp_path, name, arguments, message):
    path = tmp_path / name
    if path.suffix == ".csv":
        write_csv(path, columns())
    else:
        path.touch()
        np.save(tmp_path / "a.npy", INPUTS)
    with pytest.raises(ValueError, match=re.escape(message)):
        ArraySequences(str(path), **arguments).setup()


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=re.escape(f"there is none at {tmp_path / 'a.npy'}")):
        ArraySequences(str(tmp_path / "a.npy"))


def test_without_pyarrow_a_parquet_file_says_what_to_install(tmp_path, monkeypatch):
    write_parquet(tmp_path / "a.parquet", columns())
    for name in [name for name in sys.modules if name.split(".")[0] == "pyarrow"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Without("pyarrow"), *sys.meta_path])
    with pytest.raises(ModuleNotFoundError, match=re.escape("pip install 'flowattn[data]'")):
        ArraySequences(str(tmp_path / "a.parquet"), sequence_column="id").setup()


class Without:
    """Hides a package from the import system."""

    def __init__(self, package):
        self.package = package

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == self.package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
