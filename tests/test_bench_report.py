"""The report of the benchmarks: the README's figures are the records', and no place where ours loses is left out."""

import copy
import json
import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ds_tileoverlap import cli
from ds_tileoverlap.bench import page as bench_page
from ds_tileoverlap.bench import records, report
from ds_tileoverlap.bench.records import BOTH
from ds_tileoverlap.bench.report import FUSED

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "examples" / "results"


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(RECORDS, tmp_path / "results"))


def change(folder, name, edit, to=None):
    """Writes a record of the folder, edited, over itself or as another run."""
    record = json.loads((folder / f"{name}.json").read_text())
    edit(record)
    (folder / f"{to or name}.json").write_text(json.dumps(record))


def times_of(**medians):
    """An edit of a layer's record: forward + backward of these arms."""

    def edit(record):
        for arm, median in medians.items():
            record["arms"][arm]["forward_backward_ms"]["median"] = median

    return edit


def results(folder):
    return report.results(records.read(folder))


def cell(text, row, column):
    """Of the first table that has a column and a row that start so."""
    for table in text.split("\n\n"):
        header, *rows = (line.strip("| ").split(" | ") for line in table.splitlines())
        columns = [place for place, name in enumerate(header) if name.startswith(column)]
        for cells in rows:
            if cells[0].startswith(row) and columns:
                return cells[columns[0]]
    raise AssertionError(f"no table has {row!r} and {column!r}")


def worse(folder):
    return {found[:5]: found.extra for found in records.worse(records.read(folder))}


def test_the_readme_is_what_the_records_say():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme == report.with_results(readme, results(RECORDS)), "ds-tileoverlap bench report --readme"


def test_figures_follow_the_records(folder):
    change(folder, "qwen3-30b", times_of(ours=4.0, stock=50.0))
    text = results(folder)
    assert cell(text, "ours, `overlap` against DeepSpeed MoE", "qwen3-30b") == "12.50x"
    assert "/ 4.00 ms" in cell(text, "ours, `overlap`", "qwen3-30b")


def test_only_the_part_between_the_markers_changes(folder, tmp_path, capsys):
    readme = tmp_path / "README.md"
    readme.write_text(f"above\n{report.BEGIN}\nold\n{report.END}\nbelow\n")
    assert cli.main(["bench", "report", str(folder), "--readme", str(readme)]) == 0
    text = capsys.readouterr().out
    assert readme.read_text() == f"above\n{report.BEGIN}\n{text}{report.END}\nbelow\n"


def test_every_place_where_ours_is_slower(folder):
    change(
        folder,
        "olmoe",
        times_of(ours=20.0, ours_autoep=9.0, sequential=10.0, stock=40.0, autoep=16.0, autoep_fused=8.0),
    )
    places = {place[3:]: extra for place, extra in worse(folder).items() if place[:3] == ("olmoe", "layer", BOTH)}
    assert places == {
        ("ours", "sequential"): 1.0,
        ("ours", "autoep"): 0.25,
        ("ours", "autoep_fused"): 1.5,
        ("ours_autoep", "autoep_fused"): 0.125,
        ("sequential", "autoep_fused"): 0.25,
    }
    assert "ours, `overlap` against AutoEP: olmoe +25.0%" in " ".join(results(folder).split())


def test_a_new_arm_is_compared_as_another_package(folder):
    change(folder, "mixtral", lambda record: record["arms"].update(other=copy.deepcopy(record["arms"]["stock"])))
    change(folder, "mixtral", times_of(other=1.0))
    slower = {place[3] for place in worse(folder) if place[4] == "other" and place[2] == BOTH}
    assert slower == {"ours", "ours_autoep", "sequential"}
    assert "/ 1.00 ms" in cell(results(folder), "other", "mixtral")


def test_steps_are_compared_with_the_same_model(folder):
    arms = {"stock": 9.0, "sequential": 3.0, "ours": 4.0, "autoep_fused": 1.0, "ours_autoep": 2.0}
    times = {arm: {"median": median} for arm, median in arms.items()}
    change(folder, "step-olmoe", lambda record: record.update(step_ms=times))
    found = {place[3:] for place in worse(folder) if place[0] == "step-olmoe"}
    assert found == {("ours", "sequential"), ("ours_autoep", "autoep_fused")}


def test_a_model_has_one_line_for_all_its_arms(folder):
    keep_only(folder, ["step-olmoe", "step-autoep-olmoe", "step-autoep-mixtral"])
    times = {arm: {"median": median} for arm, median in {"stock": 9.0, "ours": 4.0, "ours_autoep": 2.0}.items()}
    change(folder, "step-olmoe", lambda record: record.update(step_ms={arm: times[arm] for arm in ("stock", "ours")}))
    change(folder, "step-autoep-olmoe", lambda record: record.update(step_ms={"ours_autoep": times["ours_autoep"]}))
    lines = [line for line in results(folder).splitlines() if " layers of " in line]
    assert lines[0] == "| 4 layers of olmoe | 9.00 ms | 4.00 ms | - | 2.00 ms |"
    assert len(lines) == 2 and lines[1].startswith("| 2 layers of mixtral | - | - | ")
    change(folder, "step-olmoe", lambda record: record.update(step_ms=times))
    assert sum("| 4 layers of olmoe |" in line for line in results(folder).splitlines()) == 2, "no time takes another's"


def test_sizes_that_shapes_share_stand_once(folder):
    keep_only(folder, ["stages-paper-like", "stages-paper-like-skewed", "stages-olmoe"])
    header = next(line for line in results(folder).splitlines() if line.startswith("| stage |"))
    assert header == "| stage | olmoe (2048, 1024, 64, 8) | paper-like (4096, 2048, 32, 2) | paper-like-skewed |"


def test_stages_are_compared_with_the_same_work(folder):
    def edit(record):
        arms = {
            "torch": 1.0,
            "gemm": 1.1,
            "sequential": 2.0,
            "overlap": 3.0,
            "serial": 1.0,
            "rows 0": 0.5,
            "sums 0": 2.0,
            "rows 8": 0.1,
        }
        record["times_ms"] = {f"{stage}: {arm}": {"median": ms} for stage in FUSED for arm, ms in arms.items()}

    change(folder, "stages-olmoe", edit)
    found = {place[3:] for place in worse(folder) if place[:3] == ("stages-olmoe", "stage", "down")}
    assert found == {("overlap", "sequential"), ("gemm", "torch"), ("sums 0", "serial")}
    assert cell(results(folder), "down", "olmoe") == "0.67x; 33%"
    assert cell(results(folder), "return", "olmoe") == "2.00x"


def test_other_runs_give_a_range(folder):
    change(folder, "qwen3-30b", times_of(autoep_fused=8.0, ours=4.0))
    for number, median in ((2, 5.0), (10, 10.0)):
        change(folder, "qwen3-30b", times_of(ours=median), f"qwen3-30b.{number}")
    (benchmark,) = (b for b in records.read(folder) if b.runs[0].name == "qwen3-30b")
    assert [run.name for run in benchmark.runs][:2] == ["qwen3-30b", "qwen3-30b.2"]
    assert benchmark.runs[-1].name == "qwen3-30b.10"
    text = results(folder)
    assert "/ 4.00 (5.00 to 10.00) ms, " in cell(text, "ours, `overlap`", "qwen3-30b")
    assert cell(text, "ours, `overlap` against AutoEP, fused options", "qwen3-30b") == "2.00x (0.80 to 1.60)"
    assert "qwen3-30b.10 +25.0%" in " ".join(text.split()), "where only another run is slower is listed too"


def test_a_run_without_an_arm_leaves_the_range_to_the_others(folder):
    change(folder, "olmoe", times_of(ours=4.0, stock=8.0))
    change(folder, "olmoe", lambda record: record["arms"].pop("stock"), "olmoe.2")
    assert cell(results(folder), "ours, `overlap` against DeepSpeed MoE", "olmoe") == "2.00x"


def test_how_records_are_made_again(folder):
    keep_only(folder, ["step-olmoe", "olmoe"])
    again = "ds-tileoverlap bench run layer --shapes F --ranks 2"
    change(folder, "olmoe", lambda record: record["environment"].update(command=again, commit="abc1234"))
    lines = results(folder).splitlines()
    assert f"`{again} --out DIR` (abc1234)" in lines
    assert any(line.startswith("`torchrun --standalone --nproc_per_node=2 examples/") for line in lines)


FAULTS = {
    "broken": ("olmoe", "{", "not a record of a benchmark"),
    "other": ("olmoe", '{"a": 1}', "not a record of a benchmark, which has one of the fields arms, times_ms"),
    "incomplete": ("olmoe", '{"arms": {}}', "not a record of a benchmark: KeyError('environment')"),
}


@pytest.mark.parametrize("name,text,words", FAULTS.values(), ids=FAULTS)
def test_a_file_that_is_no_record(folder, capsys, name, text, words):
    (folder / f"{name}.json").write_text(text)
    assert f"{name}.json: {words}" in failed(folder, capsys)


def test_what_is_no_result(folder, capsys):
    change(folder, "olmoe", lambda record: record["gate"].update(passed=False))
    change(folder, "stages-olmoe", lambda record: record.update(gate={"passed": False}, times_ms={}))
    change(folder, "mixtral", lambda record: record["environment"].pop("nccl"))
    change(folder, "mixtral-2048", lambda record: None, "qwen3-30b.2")
    said = failed(folder, capsys)
    assert "/olmoe.json: its equality gate failed" in said and "stages-olmoe.json: its equality gate failed" in said
    assert "mixtral.json: a smoke test on" in said
    assert "qwen3-30b.2.json: another benchmark or shape than qwen3-30b.json" in said


def test_no_records(tmp_path, capsys):
    assert f"{tmp_path}: no records" in failed(tmp_path, capsys)


def test_a_readme_without_markers_is_left_alone(tmp_path, capsys):
    readme = tmp_path / "README.md"
    readme.write_text(report.END)
    assert "expected a line <!-- results -->" in failed(RECORDS, capsys, "--readme", str(readme))
    assert readme.read_text() == report.END


def test_a_page_is_not_overwritten(tmp_path, capsys):
    page = tmp_path / "page.html"
    page.write_text("old")
    assert f"--html: {page} exists already" in failed(RECORDS, capsys, "--html", str(page))
    assert page.read_text() == "old"


def test_a_page_needs_matplotlib(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ds_tileoverlap.bench.page", None)
    assert "pip install matplotlib" in failed(RECORDS, capsys, "--html", str(tmp_path / "page.html"))
    assert not list(tmp_path.iterdir())


def failed(folder, capsys, *options):
    assert cli.main(["bench", "report", str(folder), *options]) == 2
    out, err = capsys.readouterr()
    assert not out
    return err


def test_json(capsys):
    assert cli.main(["bench", "report", str(RECORDS), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    record = json.loads((RECORDS / "olmoe.json").read_text())
    assert found["measures"]["olmoe"]["forward"]["ours"] == record["arms"]["ours"]["forward_ms"]
    assert [tuple(place.values()) for place in found["worse"]] == records.worse(records.read(RECORDS))


class Page(HTMLParser):
    """Elements that are open, what the page refers to, its ids, and the text of its elements by tag."""

    VOID = {"meta", "br", "hr", "img"}

    def __init__(self, text):
        super().__init__()
        self.open, self.references, self.ids = [], [], []
        self.found = {tag: [] for tag in ("h2", "td", "svg", "script")}
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.handle_startendtag(tag, attributes)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        for name, value in attributes:
            if name.split(":")[-1] in ("src", "href"):
                self.references.append(value)
            if name == "id":
                self.ids.append(value)
            self.references += re.findall(r"url\((.*?)\)", value or "")
        self.found.setdefault(tag, []).append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.found[self.open[-1]][-1] += data


@pytest.fixture(scope="module")
def page():
    return bench_page.page(records.read(RECORDS))


def test_the_page_is_whole_and_loads_nothing(page):
    found = Page(page)
    assert not found.open
    assert found.references and {*found.references} <= {f"#{name}" for name in found.ids}
    assert len(found.ids) == len(set(found.ids))
    assert "@import" not in page and "url(" not in "".join(found.found["style"]) and not found.found["script"]


def test_the_page_has_every_figure(page):
    cells = Page(page).found["td"]
    for benchmark in records.read(RECORDS):
        for arms in benchmark.runs[0].measures.values():
            for arm in arms.values():
                spread = f" ({arm['p10']:.3f} to {arm['p90']:.3f})" if "p10" in arm else ""
                assert f"{arm['median']:.3f}{spread}" in cells


def test_plots_take_the_colour_of_the_text(page):
    assert bench_page.INK not in page and page.count("currentColor") > 100


PLOTS = {
    "olmoe": {"Times as fast: forward + backward"},
    "olmoe olmoe-2048": {"Times as fast: forward + backward", "Time over tokens"},
    "stages-olmoe": {"Stages: efficiency, max(compute, link) over their time"},
    "step-olmoe": set(),
    "train_moe-500-steps": {"Training"},
}


@pytest.mark.parametrize("names,headings", PLOTS.items(), ids=PLOTS)
def test_plots_of_what_there_is(folder, names, headings):
    keep_only(folder, names.split())
    assert {*headings_of(folder)} - {"Results", "Percentiles: median (p10 to p90)"} == headings


GROWTH = {
    "more experts": ("olmoe", {"experts": 128}, "Time over experts"),
    "fewer tokens": ("stages-olmoe", {"tokens": 4096}, "Stages: time over tokens"),
    "fewer experts": ("stages-olmoe", {"experts": 32}, "Stages: time over experts"),
}


@pytest.mark.parametrize("name,sizes,heading", GROWTH.values(), ids=GROWTH)
def test_growth_with_one_size(folder, name, sizes, heading):
    keep_only(folder, [name])
    change(folder, name, lambda record: record["shape"].update(sizes, name="other"), "other")
    assert heading in headings_of(folder)
    change(folder, "other", lambda record: record["shape"].update(hidden=1024))
    assert heading not in headings_of(folder), "another layer"


def test_other_numbers_of_experts_are_cases_of_their_layer(folder):
    keep_only(folder, ["olmoe"])
    change(folder, "olmoe", times_of(ours=4.0, sequential=8.0))
    change(folder, "olmoe", lambda record: record["shape"].update(name="olmoe-16", experts=16), "olmoe-16")
    change(folder, "olmoe-16", times_of(sequential=6.0))
    row = "ours, `overlap` against ours, `sequential`: 8192 tokens; 8192 tokens 16 experts"
    assert cell(results(folder), row, "olmoe") == "2.00x; 1.50x"


def test_a_sweep_over_sms(folder):
    def sweep(record):
        times = record["times_ms"]
        times |= {f"down: {how} 8": times[f"down: {how} 0"] for how in ("rows", "sums")}

    keep_only(folder, ["stages-olmoe"])
    change(folder, "stages-olmoe", sweep)
    assert "Return: SMs for couriers" in headings_of(folder)


def keep_only(folder, names):
    for path in folder.iterdir():
        if path.is_file() and path.stem not in names:
            path.unlink()


def headings_of(folder):
    """Of the page; each plot has one."""
    found = Page(bench_page.page(records.read(folder))).found
    assert len(found["svg"]) == len(found["h2"]) - 2
    return found["h2"]


def test_markup_in_a_record_stays_text(folder):
    change(folder, "olmoe", lambda record: record["environment"].update(device="<script>alert(1)</script>"))
    assert not Page(bench_page.page(records.read(folder))).found["script"]
