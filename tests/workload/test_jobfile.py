"""Job files and the command line become the same jobs; what cannot work is named with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from infinity.errors import ConfigError
from infinity.native import READ, WRITE
from infinity.workload.job import Blocks, Job
from infinity.workload.jobfile import read_job_file, read_words

FILE = """\
; a comment
# another
[global]
bs=8k
rw = randread
time_based
runtime=2m

[one]
size=1g

[global]
bsrange=4k-16k

[two]
size=4m
bssplit=4k/50:16k/:32k/
name=renamed
iodepth=8
"""


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def jobs_of(*words: str) -> list[Job]:
    return [text.job() for group in read_words(words) for text in group]


def test_globals_hold_for_the_sections_below_them(tmp_path):
    one, two = (text.job() for text in read_job_file(written(tmp_path / "a.fio", FILE)))
    assert (one.name, one.rw, one.size, one.time_based, one.runtime) == ("one", "randread", 1 << 30, True, 120.0)
    assert one.blocks[READ] == Blocks((8192,), (1.0,))
    assert two.name == "renamed" and two.iodepth == 8
    assert two.blocks[READ] == Blocks((4096, 16384, 32768), (0.5, 0.25, 0.25))  # the last of bs, bsrange, bssplit holds


def test_the_command_line_says_the_same_in_dashes(tmp_path):
    words = "--rw=randread --time_based --runtime=2m --bs=8k --name=one --size=1g --name=two --size 4m --iodepth 8".split()
    one, two = jobs_of(*words)
    (same, _) = (text.job() for text in read_job_file(written(tmp_path / "a.fio", FILE)))
    assert one == same
    assert (two.name, two.size, two.iodepth, two.rw) == ("two", 4 << 20, 8, "randread")


def test_keys_before_the_first_name_hold_for_job_files_too_and_files_are_groups(tmp_path):
    first, second = written(tmp_path / "a.fio", "[a]\nsize=1m\n[b]\nsize=1m\ndirect=1"), written(tmp_path / "b.fio", "[c]\nsize=1m")
    groups = read_words(["--direct=0", str(first), str(second)])
    assert [[text.name for text in group] for group in groups] == [["a", "b"], ["c"]]
    assert [text.job().direct for group in groups for text in group] == [False, True, False]
    assert [(setting.key, setting.value) for setting in groups[0][0].shared] == [("direct", "0")]


def test_defaults_are_fios_except_two():
    (job,) = jobs_of("--name=x")
    assert (job.rw, job.iodepth, job.numjobs, job.ioengine, job.rwmixread, job.fsync) == ("read", 1, 1, "psync", 50, 0)
    assert job.blocks == (Blocks((4096,), (1.0,)),) * 2
    assert not (job.time_based or job.unlink or job.verify)
    assert job.direct and job.iomem == "mmaphuge"


@pytest.mark.parametrize(
    ("text", "reads", "writes"),
    [("bs=8k,32k", (8192,), (32768,)), ("bs=,8k", (4096,), (8192,)), ("bs=4k-12k", (4096, 8192, 12288), (4096, 8192, 12288)),
     ("bsrange=1k-2k,4k-8k", (1024, 2048), (4096, 8192)), ("bssplit=2k/50:4k/50,4k/90:8k/10", (2048, 4096), (4096, 8192))],
)  # fmt: skip
def test_block_sizes_of_reads_and_writes(text, reads, writes):
    (job,) = jobs_of("--name=x", "--rw=rw", f"--{text}")
    assert (job.blocks[READ].sizes, job.blocks[WRITE].sizes) == (reads, writes)
    assert all(sum(blocks.weights) == pytest.approx(1) for blocks in job.blocks)


def test_a_job_of_one_direction_has_the_sizes_of_that_direction():
    (job,) = jobs_of("--name=x", "--rw=write", "--bs=1m,4k", "--size=8k")
    assert job.blocks[READ] == job.blocks[WRITE] == Blocks((4096,), (1.0,))


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("[a]\nsize=1m\nstonewall", ":3: stonewall is not supported"),
        ("[a]\nioedpth=4", ":2: ioedpth is not supported; did you mean iodepth?"),
        ("[a]\nsize", ":2: size needs a value: size=VALUE"),
        ("[a]\nsize=1q", ":2: size=1q: '1q' is not a size"),
        ("[global]\niodepth=0\n[a]", ":2: iodepth=0: Input should be greater than or equal to 1"),
        ("[a]\nioengine=io_uring", ":2: ioengine=io_uring: Input should be 'psync' or 'libaio'"),
        ("[a]\nrw=trim", ":2: rw=trim"),
        ("[a]\nrw=randread:8", ":2: rw=randread:8: 'randread:8': offset modifiers"),
        ("[a]\nverify=md5", ":2: verify=md5"),
        ("[a]\nbssplit=4k/60:8k/30", "add up to 90, not to 100"),
        ("[a]\nbs=1k,2k,3k", "has a part for trims"),
        ("[a]\nbs=0", "a block of 0 bytes"),
        ("[a]\nbs=2g", "a block of 2147483648 bytes: the engine takes 1 byte to 1 GiB"),
        ("\n[a]\ntime_based", ":2: job a: time_based needs a runtime"),
        ("[a]\nsize=4k\nbs=8k", ":1: job a: size=4096 is too small for a block of 8192 bytes"),
        ("[a]\nverify=crc32c\nrw=write\nnumjobs=2\nfilename=x", "verify needs a file for each clone"),
        ("size=1m", ":1: 'size=1m' stands before the first [section]"),
        ("[global]\nsize=1m", "has no job"),
    ],
)
def test_what_cannot_work_is_named_with_its_line(tmp_path, lines, said):
    path = written(tmp_path / "bad.fio", lines)
    with pytest.raises(ConfigError) as caught:
        jobs_of(str(path))
    assert said in str(caught.value) and str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no job: give --name=NAME"),
        (["--rw=read"], "no job"),
        (["--name=x", "--foo=1"], "--foo=1: foo is not supported"),
        (["--name=x", "--foo"], "--foo: foo is not supported"),
        (["--name=x", "--bs"], "--bs: bs needs a value"),
        (["--name="], "name"),
        (["--name=a/b"], "has a slash in it"),
        (["absent.fio"], "absent.fio: cannot be read as a job file: No such file or directory"),
        (["/"], "/: cannot be read as a job file: Is a directory"),
    ],
)
def test_words_that_cannot_work_are_named(words, said):
    with pytest.raises(ConfigError, match=".") as caught:
        jobs_of(*words)
    assert said in str(caught.value)


def test_a_job_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "a.fio").write_bytes(b"\xff\xfe\x00[a]")
    with pytest.raises(ConfigError, match="it is no text"):
        read_job_file(tmp_path / "a.fio")
