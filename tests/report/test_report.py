"""`report`: the page needs nothing else, shows what the run did, and trusts nothing that comes from the run."""

import base64
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

from core.rl.trajectory import encode_samples
from core.telemetry.files import append_line, write_atomic
from launcher import cli
from launcher.reporting.curves import Line, chart, thin, ticks
from launcher.reporting.page import page
from launcher.reporting.summary import summarise
from launcher.run_dir import RunDir
from tests.report.conftest import sample

VOID_TAGS = {"meta", "img", "br", "hr"}


class Reader(HTMLParser):
    """Tags in order, with a stack that must come out empty."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID_TAGS:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    assert reader.stack == []
    return reader


def test_the_summary_counts_what_the_run_wrote(run_dir: RunDir) -> None:
    summary = summarise(run_dir)
    assert summary["steps"] == 5
    assert (summary["first_eval_accuracy"], summary["last_eval_accuracy"]) == (0.25, 0.75)
    assert [e["accuracy"] for e in summary["evaluations"]["valid"]] == [0.25, 0.75]
    assert [e["accuracy"] for e in summary["evaluations"]["valid-shuffled"]] == [0.2]
    assert summary["reward_curve"] == [(step, step / 10) for step in range(1, 6)]
    assert summary["secs"] == {"step": 10.0, "wait_batch": 2.5, "forward_backward": 5.0, "publish": 1.25, "other": 1.25}
    assert summary["wall_secs"] == 8.0
    assert summary["sync_secs"]["median"] == pytest.approx(0.3) and summary["sync_secs"]["max"] == pytest.approx(0.5)
    assert summary["void"] == {"bad row": 1, "failed": 2}
    assert summary["reward_errors"] == {"timeout": 2}
    assert (summary["groups"], summary["samples"], summary["tokens"]) == (20, 80, 500)
    assert summary["staleness_max"] == 2
    assert summary["ratio_first_minibatch_max"] == pytest.approx(5e-7)
    json.dumps(summary)


def test_the_page_needs_nothing_else(run_dir: RunDir) -> None:
    reader = read(page(run_dir, summarise(run_dir)))
    for tag, attributes in reader.tags:
        assert tag not in ("script", "link", "iframe", "object", "b script")
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name in ("src", "href"):
                assert (value or "").startswith("data:image/png;base64,")


def test_answers_stand_beside_their_images(run_dir: RunDir) -> None:
    reader = read(page(run_dir, summarise(run_dir)))
    images = [attributes["src"] or "" for tag, attributes in reader.tags if tag == "img"]
    assert len(images) == 6  # two groups of the first, the middle and the last batch
    for image in images:
        with Image.open(io.BytesIO(base64.b64decode(image.split(",", 1)[1]))) as picture:
            assert picture.size == (84, 84)
    for step in (1, 3, 5):
        assert f"Step {step}" in reader.text
    assert "<script>alert('x')</script> & \\boxed{3}" in reader.text
    assert "How many <b>red</b> shapes?" in reader.text
    assert "versions 0–1" in reader.text
    assert "5–5" in reader.text and "valid-shuffled" in reader.text
    assert "bad row" in reader.text and "timeout" in reader.text and "a <note>" in reader.text


def test_large_images_are_made_smaller(run_dir: RunDir) -> None:
    name = next(run_dir.images.glob("*.png"))
    Image.effect_noise((1600, 800), 80).save(name)
    reader = read(page(run_dir, summarise(run_dir)))
    sizes = set()
    for tag, attributes in reader.tags:
        if tag == "img":
            with Image.open(io.BytesIO(base64.b64decode((attributes["src"] or "").split(",", 1)[1]))) as picture:
                sizes.add(picture.size)
    assert sizes == {(84, 84), (320, 160)}


def test_torn_and_missing_files_are_named_and_cost_nothing_else(run_dir: RunDir) -> None:
    body = (run_dir.batches / "000003.safetensors").read_bytes()
    (run_dir.batches / "000003.safetensors").write_bytes(body[: len(body) // 2])
    for image in run_dir.images.glob("a1*.png"):
        image.write_bytes(b"not a picture")
    for image in run_dir.images.glob("b2*.png"):
        image.unlink()
    with run_dir.metrics.open("a") as file:
        file.write('{"kind": "step", "st')
    run_dir.state.write_text("{")
    reader = read(page(run_dir, summarise(run_dir)))
    assert "torn" in reader.text and "No such file" in reader.text and "cannot identify" in reader.text
    assert "Step 1" in reader.text and "Step 5" in reader.text


def test_an_image_name_cannot_leave_the_run(run_dir: RunDir) -> None:
    for path in run_dir.batches.glob("*"):
        path.unlink()
    (image,) = sample(0, 0, 1.0, 1).images
    outside = sample(0, 0, 1.0, 1, images=(type(image)("../../../secret", (1, 1), (1, 1), (1, 2, 2)),))
    write_atomic(run_dir.batches / "000001.safetensors", encode_samples([outside], {"step": 1}))
    reader = read(page(run_dir, summarise(run_dir)))
    assert "impossible name" in reader.text and not [tag for tag, _ in reader.tags if tag == "img"]


def test_a_run_that_did_nothing_has_a_page(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "e" / "t")
    run.create()
    write_atomic(run.config, "type: rl\n")
    summary = summarise(run)
    assert summary["steps"] == 0 and summary["last_eval_accuracy"] is None
    assert "nothing recorded" in read(page(run, summary)).text


def test_an_sft_run_has_its_loss(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "e" / "t")
    run.create()
    write_atomic(run.config, "type: sft\n")
    for step in range(1, 4):
        record = {"kind": "sft", "step": step, "loss": 1 / step, "tokens": 10, "forward_backward_secs": 0.25}
        append_line(run.metrics, {**record, "optimizer_secs": 0.125, "secs": 0.5, "eta_secs": 9.0})
    summary = summarise(run)
    assert (
        summary["type"] == "sft" and summary["steps"] == 3 and summary["curves"]["loss"][-1][1] == pytest.approx(1 / 3)
    )
    assert summary["secs"] == {"step": 1.5, "forward_backward": 0.75, "optimizer": 0.375, "other": 0.375}
    assert "Sampled answers" not in read(page(run, summary)).text


def test_the_command_writes_the_page_or_prints_json(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(run_dir.root)]) == 0
    written = Path(capsys.readouterr().out.strip())
    assert written == run_dir.root / "report.html"
    read(written.read_text())
    assert cli.main(["report", str(run_dir.root), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 5


def test_a_run_may_be_named_experiment_trial(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = run_dir.root.parent.parent
    (root / "runs").mkdir()
    run_dir.root.parent.rename(root / "runs" / "exp")
    monkeypatch.chdir(root)
    assert cli.main(["report", "exp/t0", "--json"]) == 0
    capsys.readouterr()
    assert cli.main(["report", "exp/t1"]) == 2
    assert "there is: exp/t0" in capsys.readouterr().err


def test_a_page_that_cannot_be_written_is_a_user_error(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(run_dir.root), "--out", str(run_dir.root / "no" / "page.html")]) == 2
    assert "--out" in capsys.readouterr().err


def test_a_chart_is_well_formed_and_inside_its_frame() -> None:
    html = chart("a & b", [Line("x<y", [(i, (-1) ** i * 1e-7 * i) for i in range(2000)]), Line("none", [])])
    svg = ElementTree.fromstring(re.search("<svg.*</svg>", html).group())  # type: ignore[union-attr]
    (polyline,) = svg.findall("polyline")
    points = [tuple(map(float, pair.split(","))) for pair in polyline.attrib["points"].split()]
    assert len(points) == 600
    assert all(0 <= x <= 560 and 0 <= y <= 220 for x, y in points)


def test_thinning_keeps_the_mean() -> None:
    points = [(float(i), float(i)) for i in range(6000)]
    assert sum(y for _, y in thin(points)) / 600 == pytest.approx(2999.5)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-3e-9, 4e-9), (1e6, 1e6 + 1), (0.19, 0.93)])
def test_ticks_are_few_round_and_inside(low: float, high: float) -> None:
    found = ticks(low, high)
    assert 2 <= len(found) <= 7
    assert all(low - 1e-12 <= tick <= high + 1e-12 for tick in found)
