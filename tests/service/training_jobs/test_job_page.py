"""Training jobs as people and scripts look at them: series, history, logs; stopped and resumed by a form."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest
from page_parts import BROWSER, stranger
from service_parts import Running
from torchrelay.service.jobs.training import records
from training_parts import STEPS, TrainingPool, begun, ended
from waiting import wait_until


@pytest.fixture
def browser(gateway: Running, http: httpx2.Client) -> httpx2.Client:
    client = stranger(gateway)
    token = http.headers["authorization"].partition(" ")[2]
    assert client.post("/sign-in", data={"token": token}).status_code == 303
    return client


def test_a_job_is_shown_with_its_series_history_logs_and_files(
    http: httpx2.Client, browser: httpx2.Client, pool: TrainingPool
) -> None:
    pool.says = ["<b>the end</b>"]
    name = begun(http, capture=False)
    ended(http, name)
    http.put(f"/v1/trains/{name}/files/profile/trace.json", content=b"{}").raise_for_status()
    shown = http.get(f"/jobs/{name}").json()
    assert shown["job"] == http.get(f"/v1/trains/{name}").json()
    (loss,) = shown["series"]
    assert loss["name"] == "loss" and loss["lines"]["0"][-1] == [STEPS - 1, 1 / STEPS]
    assert [line for each in shown["logs"] for line in each["lines"]] == [
        *(f"step {step}" for step in range(STEPS)),
        "<b>the end</b>",
    ]
    assert shown["actions"] == []
    page = browser.get(f"/jobs/{name}").text
    for text in (
        "a job",
        "Loss",
        "&lt;b&gt;the end",
        "the disk is full",
        "profile/trace.json",
        "rank 1 of 2",
    ):
        assert text in page
    assert browser.get(f"/v1/trains/{name}/files/profile/trace.json", headers=BROWSER).content == b"{}"
    assert browser.get(f"/v1/trains/{name}").status_code == 401  # its files are of the page, the rest is not
    assert name in browser.get("/jobs").text
    assert http.get("/jobs").json() == http.get("/v1/trains").json()


def test_logs_are_chosen_by_rank_and_text(http: httpx2.Client, pool: TrainingPool) -> None:
    name = begun(http, capture=False)
    ended(http, name)

    def lines(**params: str | int) -> list[str]:
        logs = http.get(f"/jobs/{name}", params=params).json()["logs"]
        return [line for each in logs for line in each["lines"]]

    assert lines(rank=1) == [f"step {step}" for step in range(1, STEPS, 2)]
    assert lines(search="STEP 3") == ["step 3"]
    assert lines(rank=0, search="step 3") == []


@pytest.mark.parametrize("archived", [1, 7, 1000])
def test_the_latest_are_shown_wherever_they_are(
    http: httpx2.Client, pool: TrainingPool, monkeypatch: pytest.MonkeyPatch, archived: int
) -> None:
    """In Redis, or in packs in the blob store; a job that has ended has all of them there."""
    monkeypatch.setattr(records, "ARCHIVE_ENTRIES", archived)
    monkeypatch.setattr("torchrelay.service.gateway.pages.jobs._REPORTS", 3)
    name = begun(http, capture=False)
    ended(http, name)
    (loss,) = http.get(f"/jobs/{name}").json()["series"]
    assert [step for step, _ in loss["lines"]["0"]] == [STEPS - 3, STEPS - 2, STEPS - 1]


def test_long_logs_are_cut_to_their_latest_lines(
    http: httpx2.Client, pool: TrainingPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchrelay.service.gateway.pages.jobs._LINES", 4)
    pool.says = [f"line {number}" for number in range(3)]
    name = begun(http, capture=False)
    ended(http, name)
    logs = http.get(f"/jobs/{name}").json()["logs"]
    assert [line for each in logs for line in each["lines"]] == [f"step {STEPS - 1}", *pool.says]


def test_a_form_stops_a_job_and_resumes_it(
    http: httpx2.Client, browser: httpx2.Client, pool: TrainingPool, tmp_path: Path
) -> None:
    pool.pace = 60.0
    name = begun(http, capture=False)
    wait_until(lambda: bool(pool.orders), seconds=20)
    assert 'value="stop"' in browser.get(f"/jobs/{name}").text
    answer = browser.post(f"/jobs/{name}", data={"action": "stop"})
    assert (answer.status_code, answer.headers["location"]) == (303, name)
    assert ended(http, name)["state"] == "cancelled"
    pool.pace = 0.0
    assert 'value="resume"' in browser.get(f"/jobs/{name}").text
    assert browser.post(f"/jobs/{name}", data={"action": "resume"}).status_code == 303
    assert ended(http, name)["state"] == "done"
    refused = browser.post(f"/jobs/{name}", data={"action": "burn"})
    assert refused.status_code == 422 and "stop, resume" in refused.text
    foreign = {"Sec-Fetch-Site": "cross-site"}
    assert browser.post(f"/jobs/{name}", data={"action": "stop"}, headers=foreign).status_code == 403


def test_who_may_start_no_job_has_no_buttons(
    gateway: Running, http: httpx2.Client, pool: TrainingPool
) -> None:
    pool.pace = 60.0
    name = begun(http, capture=False)
    token = http.post("/v1/tokens", json={"name": "reader", "roles": ["read"]}).json()["token"]
    reader = stranger(gateway)
    reader.post("/sign-in", data={"token": token})
    page = reader.get(f"/jobs/{name}")
    assert page.status_code == 200 and 'name="action"' not in page.text
    assert reader.post(f"/jobs/{name}", data={"action": "stop"}).status_code == 403
    http.post(f"/v1/trains/{name}/cancel")


def test_a_job_that_is_none(http: httpx2.Client) -> None:
    for path in (f"/jobs/{'0' * 16}", f"/jobs/{'0' * 16}/part"):
        assert http.get(path).status_code == 404
    assert "torchrelay train train.py" in http.get("/jobs", headers=BROWSER).text
