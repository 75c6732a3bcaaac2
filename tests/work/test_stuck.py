"""Jobs obey although their horse hangs, or is not forked yet because a model is being loaded."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from waiting import holds_for, wait_until
from workplaces import Workplace, seconds_until, workplace

from warmd.daemon.host.messages import RunJob, StopJob

OBEYED_S = 2.0  # for a request to take effect in any state


@pytest.fixture
def place() -> Iterator[Workplace]:
    with workplace() as made:
        yield made


@pytest.mark.slow
def test_a_horse_that_does_not_stop_a_canceled_answer_is_replaced(place: Workplace):
    place.worker(stuck_s=1.0)
    with place.zygote() as zygote:
        stuck = place.submit()
        horse = zygote.fork()
        other = place.submit()
        assert isinstance(added := horse.next_message(), RunJob)
        assert added.job_id == other
        place.client.jobs.cancel(stuck)
        assert horse.next_message() == StopJob(stuck, "cancel")
        assert 0.5 < seconds_until(lambda: not horse.is_alive()) < 5
        horse.die()
        wait_until(lambda: place.status(stuck) == "stopped")
        assert "killed because it did not stop within 1 s" in place.client.jobs.get(stuck)["error"]
        again = zygote.fork()
        assert (again.job_id, again.request.execution) == (other, 2)
        again.end(other, "finished")
        wait_until(lambda: place.status(other) == "finished")
    assert [event["type"] for event in place.events(stuck, "stopped")] == ["stopped"]


@pytest.mark.slow
def test_a_horse_that_stops_in_time_lives_on(place: Workplace):
    place.worker(stuck_s=1.0)
    with place.zygote() as zygote:
        canceled = place.submit()
        horse = zygote.fork()
        other = place.submit()
        place.client.jobs.cancel(canceled)
        wait_until(lambda: horse.next_message() == StopJob(canceled, "cancel"))
        horse.end(canceled, "stopped", reason="cancel")
        wait_until(lambda: place.status(canceled) == "stopped")
        holds_for(1.5, horse.is_alive)  # longer than stuck_s
        horse.end(other, "finished")
        wait_until(lambda: place.status(other) == "finished")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "status"), [("cancel", "stopped"), ("kill", "stopped"), ("pause", "scheduled")]
)
def test_a_job_whose_model_is_being_loaded_obeys_and_others_get_another_horse(
    place: Workplace, how: str, status: str
):
    place.worker()
    with place.zygote() as zygote:
        addressed, other = place.submit(), place.submit()
        loading = zygote.accept()
        wait_until(lambda: {place.status(addressed), place.status(other)} == {"started"})
        requests = {
            "cancel": place.client.jobs.cancel,
            "kill": place.client.jobs.kill,
            "pause": lambda job_id: place.client.jobs.pause(job_id, release=True),
        }
        requests[how](addressed)
        assert seconds_until(lambda: place.status(addressed) == status) < OBEYED_S
        again = zygote.fork()
        assert again.job_id == other
        # A horse that is forked when the model is there finds that its worker has gone, and ends.
        assert [type(message) for message in loading] == [RunJob]
        loading.close()
        again.end(other, "finished")
        wait_until(lambda: place.status(other) == "finished")


@pytest.mark.slow
def test_a_worker_ends_at_once_while_a_model_is_being_loaded(place: Workplace):
    worker = place.worker()
    with place.zygote() as zygote:
        job_id = place.submit()
        loading = zygote.accept()
        wait_until(lambda: place.status(job_id) == "started")
        worker.terminate()
        assert seconds_until(lambda: worker.poll() is not None) < OBEYED_S
        loading.close()
    assert worker.returncode == 0
    assert place.status(job_id) == "queued"
