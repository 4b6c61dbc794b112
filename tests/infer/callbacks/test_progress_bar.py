"""What a progress bar shows."""

from pyro_lvgp._utils.distributed import ProcessGroup
from pyro_lvgp.infer import Checkpoint, FitState, ProgressBar
from tests.helpers.fits import Climb, OnStep, no_guide


def test_alone(capsys):
    state, bar = FitState(Climb().model, no_guide, num_steps=2), ProgressBar()
    bar.on_start(state)
    for _ in range(2):
        state.take_step()
        bar.on_step(state)
    bar.on_end(state)
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert "bound/entry" in shown


def test_it_begins_where_a_checkpoint_ended(capsys, tmp_path):
    for num_steps in (2, 3):
        Climb().fit(num_steps=num_steps, callbacks=[Checkpoint(tmp_path / "fit.pt")], progress=True)
    assert "2/3" in capsys.readouterr().err


def test_an_interrupted_fit_is_logged(caplog):
    def interrupt(step, loss):
        if step == 1:
            raise KeyboardInterrupt

    Climb().fit(callbacks=[OnStep(interrupt)], progress=True)
    assert "interrupted after 2 steps" in caplog.text


def test_processes_but_the_first_show_none(capsys):
    state, bar = FitState(Climb().model, no_guide, num_steps=1), ProgressBar()
    state.processes = ProcessGroup()
    state.processes.rank = 1
    bar.on_start(state)
    state.take_step()
    bar.on_step(state)
    bar.on_end(state)
    assert capsys.readouterr() == ("", "")
