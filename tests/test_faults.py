"""What goes wrong in real life: kills, full disks, damaged and hostile files, bad data, bad configs."""

import os
import random
import resource
import shutil
import signal
import time

import pytest
import torch

import tests.tiny
from tests.tiny import run, start, write_config


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The folder of a training that nothing happened to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    code, output = run(folder, *fit(folder))
    assert code == 0, output
    return folder


def fit(folder, *more):
    return ["fit", "--config", str(write_config(folder)), "--trainer.default_root_dir", str(folder), *more]


def load(folder, name="last"):
    return torch.load(folder / "checkpoints" / f"{name}.ckpt", weights_only=True)


def assert_equal(one, other, where="checkpoint"):
    """Bitwise, all the way down."""
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_equal(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for number, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_equal(a, b, f"{where}/{number}")
    else:
        assert one == other, where


TRAINED = ("state_dict", "trained_state_dict", "optimizer_states", "lr_schedulers", "global_step", "callbacks")


def assert_same_training(folder, undisturbed):
    for name in ("last", "best"):
        got, wanted = load(folder, name), load(undisturbed, name)
        for key in TRAINED:
            assert_equal(got[key], wanted[key], f"{name}/{key}")


@pytest.mark.parametrize("step", [7, 9, 19])
def test_a_killed_training_goes_on_to_the_same_bits(step, undisturbed, tmp_path):
    # 7: three steps after a checkpoint, in the first epoch. 9: before the validation that ends it. 19: in the third.
    kill = ["--trainer.callbacks+", "tests.tiny.KillAt", "--trainer.callbacks.step", str(step)]
    code, output = run(tmp_path, *fit(tmp_path, *kill))
    assert code == -signal.SIGKILL, output
    assert load(tmp_path)["global_step"] < step
    code, output = run(tmp_path, *fit(tmp_path, "--ckpt_path", "last"))
    assert code == 0, output
    assert_same_training(tmp_path, undisturbed)


def kill_in_the_middle_of_writing():
    """SIGKILL when the fourth checkpoint is written but not yet in its place."""
    calls, fsync = [], os.fsync

    def kill(descriptor):
        calls.append(descriptor)
        if len(calls) == 7:  # a checkpoint waits for its file, and then for its folder
            os.kill(os.getpid(), signal.SIGKILL)
        fsync(descriptor)

    os.fsync = kill


def test_a_training_killed_while_it_writes_a_checkpoint_has_the_one_before(undisturbed, tmp_path):
    code, output = run(tmp_path, *fit(tmp_path), prepare=kill_in_the_middle_of_writing)
    assert code == -signal.SIGKILL, output
    assert list((tmp_path / "checkpoints").glob(".*.tmp"))
    assert load(tmp_path)["global_step"] == 6
    code, output = run(tmp_path, *fit(tmp_path, "--ckpt_path", "last"))
    assert code == 0, output
    assert_same_training(tmp_path, undisturbed)
    assert not list((tmp_path / "checkpoints").glob(".*.tmp"))


@pytest.mark.slow
def test_twenty_kills_in_a_row_lose_nothing(tmp_path):
    long = ["--trainer.max_steps", "120"]
    (tmp_path / "undisturbed").mkdir()
    code, output = run(tmp_path / "undisturbed", *fit(tmp_path / "undisturbed", *long))
    assert code == 0, output
    chance, last, kills = random.Random(0), tmp_path / "checkpoints" / "last.ckpt", 0
    while kills < 20:
        before = last.stat().st_mtime_ns if last.exists() else None
        process = start(tmp_path, *fit(tmp_path, *long, "--ckpt_path", "last"))
        while process.is_alive() and before == (last.stat().st_mtime_ns if last.exists() else None):
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.1))  # it got on by a checkpoint; then, anywhere
        process.kill()
        process.join()
        if process.exitcode == 0:  # it came to its end: once more from the beginning
            assert_same_training(tmp_path, tmp_path / "undisturbed")
            shutil.rmtree(tmp_path / "checkpoints")
        else:
            assert process.exitcode == -signal.SIGKILL, (tmp_path / "output.txt").read_text()
            kills += 1
    code, output = run(tmp_path, *fit(tmp_path, *long, "--ckpt_path", "last"))
    assert code == 0, output
    assert_same_training(tmp_path, tmp_path / "undisturbed")


def test_a_training_that_ran_out_of_time_goes_on_when_it_is_given_more(tmp_path):
    slow = ["--data.batch_size", "1", "--trainer.max_steps", "100000"]
    code, output = run(tmp_path, *fit(tmp_path, *slow, "--trainer.max_time", "00:00:00:01"))
    assert code == 0, output
    step = load(tmp_path)["global_step"]
    end = ["--data.batch_size", "1", "--trainer.max_steps", str(step + 10), "--trainer.max_time", "00:01:00:00"]
    code, output = run(tmp_path, *fit(tmp_path, *end, "--ckpt_path", "last"))
    assert code == 0, output
    assert load(tmp_path)["global_step"] == step + 10


def test_a_training_from_the_checkpoint_of_another_run_leaves_that_of_its_name_alone(undisturbed, tmp_path):
    shutil.copytree(undisturbed / "checkpoints", tmp_path / "run" / "checkpoints")
    before = load(tmp_path / "run", "best")
    other = str(undisturbed / "checkpoints" / "last.ckpt")
    worse = ["--trainer.max_steps", "30", "--model.optimizer.init_args.lr", "1.0", "--ckpt_path", other]
    code, output = run(tmp_path, *fit(tmp_path, *worse, "--trainer.default_root_dir", str(tmp_path / "run")))
    assert code == 0, output
    assert "An earlier run is now" in output
    assert_equal(load(tmp_path / "run-1", "best")["state_dict"], before["state_dict"])
    assert load(tmp_path / "run")["global_step"] == 30
    assert load(tmp_path / "run", "best")["global_step"] > before["global_step"]


@pytest.fixture
def trained(undisturbed, tmp_path):
    """A copy of that folder, to spoil."""
    shutil.copytree(undisturbed / "checkpoints", tmp_path / "checkpoints")
    return tmp_path


def errors(output):
    return [line for line in output.splitlines() if "rror" in line]


def test_a_checkpoint_cut_in_half_is_named_with_one_to_use(trained):
    last = trained / "checkpoints" / "last.ckpt"
    last.write_bytes(last.read_bytes()[: last.stat().st_size // 2])
    code, output = run(trained, *fit(trained, "--ckpt_path", "last"))
    assert code == 1, output
    (line,) = errors(output)
    assert f"error: {last} is damaged" in line
    assert f"Usable: {trained}/checkpoints/best.ckpt" in line


def test_a_full_disk_ends_with_one_message_and_the_last_good_checkpoint(trained):
    last = trained / "checkpoints" / "last.ckpt"
    before = last.read_bytes()

    def fill_the_disk():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # writes fail with an error in place of a signal
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2,) * 2)

    more = ["--ckpt_path", "last", "--trainer.max_steps", "40"]
    code, output = run(trained, *fit(trained, *more), prepare=fill_the_disk)
    assert code == 1, output
    (line,) = errors(output)
    assert f"{last} could not be written: File too large. The last good one is still there: {last}" in line
    assert last.read_bytes() == before
    code, output = run(trained, *fit(trained, *more))
    assert code == 0, output


def test_a_batch_that_is_not_a_number_stops_before_the_weights_are_spoiled(tmp_path):
    code, output = run(tmp_path, *fit(tmp_path, "--data.bad_batch", "12"))
    assert code == 1, output
    (line,) = errors(output)
    assert "train batch 3, step 12: sequence" in line
    assert "is nan at token 2, feature 1" in line
    last = load(tmp_path)
    assert last["global_step"] == 12
    assert all(value.isfinite().all() for value in last["trained_state_dict"].values())


class Hostile:
    def __reduce__(self):
        return os.system, ("touch hostile-code-ran",)


@pytest.mark.parametrize("command", ["fit", "test", "sample"])
def test_a_hostile_checkpoint_is_refused(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": {}, "callbacks": Hostile()}, tmp_path / "hostile.ckpt")
    arguments = [command, *fit(tmp_path)[1:], "--ckpt_path", "hostile.ckpt"]
    code, output = run(tmp_path, *arguments)
    assert code == 1, output
    (line,) = errors(output)
    assert "hostile.ckpt is refused" in line
    assert "system" in line
    assert not (tmp_path / "hostile-code-ran").exists()


BAD_CONFIGS = {
    "a key of the trainer": (["--trainer.max_stepz", "3"], "max_stepz"),
    "a section": (["--modl.flow", "x"], "modl"),
    "an argument of the flow": (["--model.flow.dept", "3"], "error: RandomFlow has no option 'dept'. It has"),
    "an argument of the data": (
        ["--data.siz", "3"],
        "error: Tiny has no option 'siz'. It has batch_size, size,",
    ),
    "an abbreviation": (["--trainer.max_step", "3"], "unrecognized arguments: --trainer.max_step 3"),
    "a class": (["--data", "flowattn.data.NoSuchData"], "NoSuchData"),
    "a value": (["--model.optimizer.lr", "fast"], "fast"),
    "a checkpoint": (["--ckpt_path", "nowhere.ckpt"], "There is no checkpoint nowhere.ckpt"),
    "the best of none": (["--ckpt_path", "best"], "There is no best checkpoint of this run"),
    "a value that the data refuse": (["--data.batch_size", "0"], "error: batch_size must be a whole number of at"),
    "a value that the model refuses": (["--model.ema", "3"], "error: ema must be between 0 and 1, or None for no"),
    "a value that the optimiser refuses": (["--model.optimizer.lr", "-1"], "error: Invalid learning rate: -1.0"),
    "a value that the trainer refuses": (["--trainer.strategy", "nosuch"], "error: You selected an invalid strategy"),
    "a batch larger than the data": (["--data.batch_size", "999"], "error: batch_size times the number of ranks must"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD_CONFIGS.values(), ids=BAD_CONFIGS.keys())
def test_a_mistake_in_the_config_is_answered_in_few_lines(arguments, message, tmp_path):
    code, output = run(tmp_path, *fit(tmp_path, *arguments))
    assert code == 1, output
    assert message in output
    assert len(output.splitlines()) <= 14, output
    assert "Traceback" not in output


def test_a_command_without_a_config_is_told_to_take_one(tmp_path):
    code, output = run(tmp_path, "fit")
    assert code == 1, output
    assert "add --config configs/NAME.yaml" in output


def test_the_traceback_of_a_mistake_is_there_for_whom_it_helps(tmp_path):
    arguments = fit(tmp_path, "--data.batch_size", "0")
    code, output = run(tmp_path, *arguments)
    assert "(FLOWATTN_DEBUG=1 shows where.)" in output and "Traceback" not in output
    code, output = run(tmp_path, *arguments, prepare=lambda: os.environ.update(FLOWATTN_DEBUG="1"))
    assert code == 2 and "Traceback" in output and "check_positive" in output


def test_an_error_that_is_no_mistake_of_the_user_keeps_its_traceback(tmp_path):
    def prepare():
        tests.tiny.RandomFlow._log_prob = lambda *_: torch.zeros(2) @ torch.zeros(3)

    code, output = run(tmp_path, *fit(tmp_path), prepare=prepare)
    assert code == 2 and "RuntimeError" in output and "Traceback" in output


@pytest.mark.parametrize(
    "mistake", [["--model.optimizer.lr", "-1"], ["--data.batch_size", "999"]], ids=["rate", "data"]
)
def test_a_fit_that_cannot_start_leaves_the_run_before_as_it_is(mistake, trained):
    (trained / "config.yaml").write_text("of the run before")
    before = {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()}
    own = {trained / "tiny.yaml", trained / "output.txt"}
    code, output = run(trained, *fit(trained, *mistake))
    assert code == 1, output
    after = {path: path.read_bytes() for path in trained.rglob("*") if path.is_file() and path not in own}
    assert after == before
    assert not trained.with_name(f"{trained.name}-1").exists()
