"""`infinity io` as people type it: reports, exit codes, and fio's own readers on its JSON."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from infinity.cli.io import format_rates
from infinity.cli.main import app
from infinity.native import READ
from infinity.workload.job import Job
from infinity.workload.report import binary, decimal
from infinity.workload.run import Progress

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def io(*words: str) -> Result:
    return CliRunner().invoke(app, ["io", *words], prog_name="infinity")


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "disk"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    return folder


def test_the_commands_of_the_readme_work(disk):
    block = next(block for block in re.findall(r"```sh\n(.*?)```", README, flags=re.DOTALL) if "infinity io" in block)
    toy = {"/mnt/nvme0": str(disk), "16g": "4m", "4g": "1m", "--runtime=30 --ramp_time=5": "--runtime=200ms --ramp_time=50ms"}
    for large, small in toy.items():
        block = block.replace(large, small)
    lines = block.splitlines()
    assert len(lines) == 3
    for line in lines:
        done = io(*shlex.split(line)[2:])
        assert done.exit_code == 0, f"{line}\n{done.output}"
    assert json.loads(Path("report.json").read_text())["jobs"][0]["write"]["io_bytes"] == 4 << 20
    assert not (disk / "seq.0.0").exists() and (disk / "mix.3.0").exists()


def test_a_report_says_first_what_is_not_fios_default_and_has_everything_in_it(disk):
    done = io(f"--directory={disk}", "--rw=randrw", "--bs=4k", "--size=512k", "--ioengine=libaio", "--iodepth=4", "--name=one", "--name=two")
    assert done.exit_code == 0, done.output
    first, *rest = done.stdout.splitlines()
    assert first == "infinity io: direct=1 iomem=mmaphuge ioengine=libaio iodepth=4 (defaults are fio's, except direct=1 and iomem=mmaphuge)"
    text = "\n".join(rest)
    for name in ("one", "two"):
        assert f"warning: job {name} ran for" in text
        assert f"{name}: (g=0, clone 0 of 1): rw=randrw, bs=(R) 4KiB-4KiB, (W) 4KiB-4KiB, ioengine=libaio" in text
    assert len(re.findall(r"^  read: IOPS=\S+, BW=[\d.]+[KM]iB/s \([\d.]+[kM]B/s\)\(", text, flags=re.MULTILINE)) == 2
    assert len(re.findall(r"^    (?:slat|clat| lat) \([num]sec\): min=\d+, max=\d+, avg=[\d.]+, stdev=[\d.]+$", text, flags=re.MULTILINE)) == 10 + 2
    assert text.count(" 1.00th=[") == text.count("99.99th=[") == 4
    assert re.search(r"cpu          : usr=[\d.]+%, sys=[\d.]+%, ctx=\d+", text)
    assert re.search(r"IO depths    : 1=.*mean=\d\.\d, max=4$", text, flags=re.MULTILINE)
    assert re.search(r"buffers      : iomem=mmaphuge, pages of [24](?:MiB|KiB)", text)
    assert re.search(r"^Run status group 0 \(all jobs\):\n +READ: bw=.*\n +WRITE: bw=", text, flags=re.MULTILINE)


def test_what_cannot_be_a_disk_is_said(disk):
    done = io("--name=a", f"--directory={disk}", "--rw=write", "--size=64k", "--direct=0", "--iodepth=8")
    warnings = [line for line in done.stdout.splitlines() if line.startswith("warning: ")]
    for said in ("the page cache may take", "these writes extend it", "too short for a drive to settle", "iodepth=8 has no effect on ioengine=psync"):
        assert len([line for line in warnings if said in line]) == 1, said
    shm = Path("/dev/shm")
    if not shm.is_dir():
        pytest.skip("no /dev/shm")
    done = io("--name=infinity-test", f"--directory={shm}", "--size=64k", "--direct=0", "--unlink=1")
    assert "/dev/shm is tmpfs: memory, not a disk" in done.stdout
    assert not list(shm.glob("infinity-test*"))


# ---- JSON: one reader for both tools ----

FIELDS = ("io_bytes", "io_kbytes", "bw_bytes", "bw", "iops", "runtime", "total_ios", "slat_ns", "clat_ns", "lat_ns", "bw_min", "bw_max", "bw_mean")


def read_fio(text: str) -> list[dict[str, Any]]:
    """What people's scripts take from fio's JSON."""
    found = []
    table = json.loads(text[text.index("{") :])
    for job in table["jobs"]:
        row = {key: job[key] for key in ("jobname", "groupid", "error", "usr_cpu", "sys_cpu", "ctx", "job_runtime", "iodepth_level", "latency_us")}
        row["bs"] = job["job options"].get("bs", table["global options"].get("bs"))
        for direction in ("read", "write", "trim"):
            side = job[direction]
            row[direction] = {field: side[field] for field in FIELDS}
            if side["total_ios"]:
                row[direction]["p99"] = side["clat_ns"]["percentile"]["99.000000"]
                row[direction]["percentiles"] = list(side["clat_ns"]["percentile"])
            row[direction]["times"] = [sorted(set(side[name]) - {"percentile"}) for name in ("slat_ns", "clat_ns", "lat_ns")]
        found.append(row)
    return found


JOB_FILE = """
[global]
directory={disk}
size=1m
bs=16k
[reader]
rw=randread
ioengine=libaio
iodepth=4
[mixer]
rw=rw
rwmixread=25
"""


def test_json_reads_as_fios_does_for_the_same_job_file(disk, tmp_path):
    if shutil.which("fio") is None:
        pytest.skip("fio is not installed")
    for name in ("ours", "theirs"):
        (disk / name).mkdir()
        (tmp_path / f"{name}.fio").write_text(JOB_FILE.format(disk=disk / name))
    done = io("ours.fio", "--output-format=json")
    assert done.exit_code == 0, done.output
    fio = subprocess.run(["fio", "theirs.fio", "--output-format=json"], capture_output=True, text=True, check=True, cwd=tmp_path)
    ours, theirs = read_fio(done.stdout), read_fio(fio.stdout)
    assert [row["jobname"] for row in ours] == [row["jobname"] for row in theirs] == ["reader", "mixer"]
    for mine, fios in zip(ours, theirs, strict=True):
        assert (mine["error"], mine["bs"], mine["groupid"]) == (fios["error"], fios["bs"], fios["groupid"]) == (0, "16k", 0)
        assert list(mine["iodepth_level"]) == list(fios["iodepth_level"])
        assert list(mine["latency_us"]) == list(fios["latency_us"])
        assert sum(mine[side]["io_bytes"] for side in ("read", "write")) == sum(fios[side]["io_bytes"] for side in ("read", "write")) == 1 << 20
        for side in ("read", "write", "trim"):
            assert mine[side].get("percentiles") == fios[side].get("percentiles")
            assert mine[side]["times"] == fios[side]["times"]
            assert mine[side]["total_ios"] * 16384 == mine[side]["io_bytes"]


def test_json_is_consistent_in_itself(disk):
    words = ["--rw=randread", "--size=1m", "--numjobs=2", "--ioengine=libaio", "--iodepth=4"]
    done = io("--name=a", f"--directory={disk}", *words, "--output-format=json")
    table = json.loads(done.stdout)
    assert table["infinity"]["settings"].startswith("infinity io: direct=1 iomem=mmaphuge")
    assert any("too short" in warning for warning in table["infinity"]["warnings"])
    assert table["infinity"]["total"]["read"]["io_bytes"] == 2 << 20
    for job in table["jobs"]:
        read = job["read"]
        assert read["clat_ns"]["N"] == read["total_ios"] == 256
        assert read["clat_ns"]["min"] <= read["clat_ns"]["percentile"]["50.000000"] * 65 / 64
        assert read["bw_bytes"] == pytest.approx(read["iops"] * 4096, abs=2)
        assert sum(job["iodepth_level"].values()) == pytest.approx(100)
        assert sum(sum(job[name].values()) for name in ("latency_ns", "latency_us", "latency_ms")) == pytest.approx(100)
        assert job["infinity"]["iodepth_max"] <= 4 and job["infinity"]["iomem_page_bytes"] in (4096, 2 << 20)


# ---- what goes wrong ----


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--name=a", "--foo=1"], 2, "error: --foo=1: foo is not supported"),
        (["--name=a", "--size=1q"], 2, "error: --size=1q: size=1q: '1q' is not a size"),
        (["--name=a", "--bs"], 2, "bs needs a value"),
        (["absent.fio"], 2, "absent.fio: cannot be read as a job file"),
        ([], 2, "no job: give --name=NAME"),
        (["--name=a", "--size=1m", "--directory=absent"], 2, "directory absent does not exist"),
        (["--name=a", "--size=1m", "--output=absent/report"], 2, "--output=absent/report: cannot be written"),
        (["--name=a", "--size=1m", "--output-format=terse"], 2, "choose normal or json"),
        (["--name=a", "--size=100t"], 1, "are to be laid out"),
        (["--name=a", "--filename=mine", "--rw=write"], 2, "--destroy-data"),
        (["--name=a", "--size=1m", f"--directory={'x' * 300}"], 1, "File name too long"),
    ],
)
def test_what_cannot_work_is_one_line_an_exit_code_and_nothing_left(disk, tmp_path, words, code, said):
    (tmp_path / "mine").write_bytes(bytes(8192))
    done = io(*words)
    assert done.exit_code == code, done.output
    assert said in done.stderr and "Traceback" not in done.stderr and not done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "mine"]


def test_ctrl_c_ends_the_run_with_its_report(disk):
    command = [sys.executable, "-m", "infinity", "io", "--name=a", f"--directory={disk}", "--size=1m", "--time_based", "--runtime=1h"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        while process.poll() is None and not (disk / "a.0.0").exists():
            time.sleep(0.05)
        time.sleep(1.0)  # past the layout, whose interruption leaves nothing to report
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert "Run status group 0" in said and "blocks under way are finished and reported" in errors
    assert [path.name for path in disk.iterdir()] == ["a.0.0"]


def test_help_names_every_key(disk):
    done = io("--help")
    assert done.exit_code == 0 and "Usage: infinity io" in done.stdout
    for name in (*Job.model_fields, "output", "output-format", "destroy-data"):
        assert re.search(rf"--{name}\b", done.stdout), name
    assert all(len(line) <= 120 for line in done.stdout.splitlines())


def test_rates_in_both_kinds_of_units():
    assert (binary(62804459), decimal(62804459)) == ("59.9MiB", "62.8MB")
    assert (binary(0), decimal(999), binary(1 << 40)) == ("0B", "999B", "1.00TiB")
    start = Progress(jobs=1, elapsed_s=1.0, total_s=9.0, read_bytes=1 << 20, write_bytes=0, ios=256, share=0.1)
    later = Progress(jobs=1, elapsed_s=3.0, total_s=9.0, read_bytes=5 << 20, write_bytes=2_000_000, ios=1256, share=0.3)
    assert format_rates(start, later, 2.0) == "r=2.00MiB/s (2.10MB/s) w=977KiB/s (1.00MB/s) 500 IOPS"
    assert READ == 0
