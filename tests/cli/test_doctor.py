"""`infinity doctor` as people and programs read it."""

from __future__ import annotations

import io
import json
import os
import re
import tempfile
from pathlib import Path

import pytest
from click.testing import Result
from rich.console import Console
from typer.testing import CliRunner

from infinity.cli import doctor
from infinity.cli.main import app
from infinity.doctor import Finding, Status
from infinity.doctor.examination import SUBJECTS
from infinity.doctor.finding import failure, ok, warning

ROOT = Path(__file__).parents[2]


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *words], prog_name="infinity")


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ---- the machine as it is ----


def test_without_a_config_the_current_directory_is_looked_at_and_left_alone(here):
    done = run("--set", "device=cpu")
    assert done.stdout.startswith(f"no CONFIG: defaults, with the current directory as NVMe path {here}\n")
    assert f"\n{here}\n" in done.stdout
    assert tree(here) == []
    assert done.exit_code == 2 * ("failure  " in done.stdout) or 1 * ("warning  " in done.stdout)


def test_a_config_brings_its_paths_its_budgets_and_the_plan_of_its_model(here):
    (here / "runs" / "nvme").mkdir(parents=True)
    (here / "examples").mkdir()
    for name in ("tiny.toml", "gpt.py"):
        (here / "examples" / name).write_text((ROOT / "examples" / name).read_text(encoding="utf-8"), encoding="utf-8")
    before = tree(here)
    done = run("examples/tiny.toml", "--json")
    told = json.loads(done.stdout)
    assert told["paths"] == [str(here / "runs" / "nvme")] and told["config"] == "examples/tiny.toml"
    found = {finding["subject"]: finding for finding in told["findings"]}
    assert "365.74 MiB in nvme" in found["plan"]["found"] and found["plan"]["status"] == "ok"
    assert "budgets.cpu = 96.00 MiB" in found["memory"]["found"]
    assert tree(here) == before


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="no tmpfs at /dev/shm")
def test_a_path_in_memory_ends_with_1_and_names_another_way():
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        done = run("--set", f'nvme.paths=["{path}"]', "--set", "device=cpu", "--json")
    told = json.loads(done.stdout)
    (found,) = (finding for finding in told["findings"] if finding["subject"] == "file system")
    assert found["status"] == "warning" and "nvme.paths" in found["way_out"]
    assert done.exit_code == told["exit_status"] >= 1


# ---- bad input ----


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("absent.toml", None, "absent.toml: no such file"),
        ("broken.toml", "[nvme\n", "broken.toml: not valid TOML"),
        ("broken.json", "{", "broken.json: not valid JSON"),
        ("typo.toml", "[nvme]\nqueue_dept = 3\n", "did you mean queue_depth"),
        ("config.yaml", "a: 1", "configurations are .toml or .json"),
    ],
)
@pytest.mark.parametrize("more", [[], ["--json"]], ids=["table", "json"])
def test_a_config_that_cannot_be_read_is_one_line_on_stderr_and_2(here, name, text, told, more):
    if text is not None:
        (here / name).write_text(text)
    before = tree(here)
    done = run(name, *more)
    assert done.exit_code == 2 and done.stdout == ""
    assert told in done.stderr and "Traceback" not in done.stderr
    assert tree(here) == before


def test_a_path_that_is_missing_is_a_failure_beside_all_other_lines(here):
    (here / "run.toml").write_text('device = "cpu"\n[nvme]\npaths = ["absent"]\n')
    done = run("run.toml")
    assert done.exit_code == 2
    assert re.search(rf"^failure  directory .*{here}/absent does not exist", done.stdout, flags=re.MULTILINE)
    assert f"way out  mkdir -p {here}/absent" in done.stdout and "kernel AIO" in done.stdout
    assert tree(here) == ["run.toml"]


def test_a_model_that_is_missing_is_a_failure(here):
    (here / "run.toml").write_text('device = "cpu"\n[train]\nmodel = "nowhere_to_be_found:build"\n')
    done = run("run.toml")
    assert done.exit_code == 2 and re.search("^failure  plan .*nowhere_to_be_found", done.stdout, flags=re.MULTILINE)


# ---- what is printed ----

LONG = "word " * 100
FINDINGS = [
    ok("torch", "9.9 [with] :brackets:"),
    warning("fs.aio-max-nr", LONG.strip(), "sudo sysctl -w fs.aio-max-nr=1"),
    failure("directory", "missing", "mkdir -p /disk", "/disk"),
]


def shown(findings: list[Finding], terminal: bool, width: int = 100) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=width, color_system=None, legacy_windows=False)
    doctor.show(console, "heading", findings)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_in_a_pipe_a_finding_is_a_line_however_long_and_its_way_out_the_next():
    assert shown(FINDINGS, terminal=False) == (
        "heading\n"
        "\n"
        "this machine\n"
        "ok       torch          9.9 [with] :brackets:\n"
        f"warning  fs.aio-max-nr  {LONG.strip()}\n"
        "               way out  sudo sysctl -w fs.aio-max-nr=1\n"
        "\n"
        "/disk\n"
        "failure  directory      missing\n"
        "               way out  mkdir -p /disk\n"
        "\n"
        "1 ok, 1 warning, 1 failure\n"
    )


@pytest.mark.parametrize("width", [80, 140])
def test_on_a_terminal_it_is_one_table_within_the_screen(width):
    lines = shown(FINDINGS, terminal=True, width=width).splitlines()
    assert max(map(len, lines)) <= width
    heads = [line for line in lines if "found" in line and "way out" in line]
    assert len(heads) == 1
    text = "\n".join(lines)
    assert all(word in text for word in ("[with] :brackets:", "failure", "/disk", "mkdir -p"))


def test_a_table_without_trouble_has_no_empty_column():
    assert "way out" not in shown(FINDINGS[:1], terminal=True)


def test_the_json_has_its_documented_form(here, monkeypatch):
    monkeypatch.setattr(doctor, "examine", lambda config, load: FINDINGS)
    done = run("--json")
    assert done.exit_code == 2
    assert json.loads(done.stdout) == {
        "version": 1,
        "config": None,
        "paths": [str(here)],
        "exit_status": 2,
        "findings": [
            {"subject": "torch", "status": "ok", "found": "9.9 [with] :brackets:", "way_out": "", "path": None},
            {"subject": "fs.aio-max-nr", "status": "warning", "found": LONG.strip(), "way_out": "sudo sysctl -w fs.aio-max-nr=1", "path": None},
            {"subject": "directory", "status": "failure", "found": "missing", "way_out": "mkdir -p /disk", "path": "/disk"},
        ],
    }


def test_the_document_shows_that_form():
    (example,) = re.findall(r"```json\n(.*?)```", (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    told = json.loads(example)
    assert told["version"] == doctor.JSON_VERSION
    assert set(told) == {"version", "config", "paths", "exit_status", "findings"}
    for finding in told["findings"]:
        assert Finding(**finding | {"status": Status(finding["status"])})


@pytest.mark.parametrize(("findings", "code"), [(FINDINGS[:1], 0), (FINDINGS[:2], 1), (FINDINGS, 2)])
def test_the_exit_status_tells_the_worst(here, monkeypatch, findings, code):
    monkeypatch.setattr(doctor, "examine", lambda config, load: findings)
    assert run().exit_code == code


def test_help_says_what_it_does_and_what_its_exit_status_means():
    done = run("--help")
    text = " ".join(done.stdout.split())
    assert done.exit_code == 0 and "[CONFIG]" in text and "--json" in text
    assert "Exit status: 0 all is ok, 1 a warning, 2 a failure" in text and "Nothing is left behind" in text


def test_the_readme_shows_lines_as_they_are_printed():
    """Its example has the subjects of the document, in their order, in the form of a pipe."""
    (example,) = re.findall(r"```text\n\$ infinity doctor .*?\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    rows = re.findall(r"^(ok|warning|failure) +(.+?)  +(\S.*)(?:\n +way out +(.*))?$", example, flags=re.MULTILINE)
    paths = {"file system", "drive", "direct I/O", "free space"}
    findings = [
        Finding(subject=subject, status=Status(status), found=found, way_out=way_out, path="/mnt/nvme0" if subject in paths else None)
        for status, subject, found, way_out in rows
    ]
    assert [finding.subject for finding in findings] == [subject for subject in SUBJECTS if subject in {row[1] for row in rows}]
    console = Console(file=io.StringIO(), force_terminal=False)
    doctor.show(console, "run.toml: NVMe paths /mnt/nvme0", findings)
    assert console.file.getvalue() == example  # type: ignore[attr-defined]
