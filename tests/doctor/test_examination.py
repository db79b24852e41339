"""The whole examination: its order, what it leaves, and that the document knows every line of it."""

from __future__ import annotations

import logging
import os
import re
import resource
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from models import tiny_gpt

from infinity.config import load_config
from infinity.doctor import Status, examine
from infinity.doctor.examination import SUBJECTS

DOCUMENT = Path(__file__).parents[2] / "docs" / "doctor.md"


def config_of(*paths: Path, **sections: object):
    return load_config({"device": "cpu", "nvme": {"paths": [str(path) for path in paths]}, **sections})


def test_lines_come_in_the_order_of_the_document_path_after_path(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    findings = examine(config_of(first, second), lambda: tiny_gpt)
    for path in (None, str(first), str(second)):
        subjects = [finding.subject for finding in findings if finding.path == path]
        assert subjects == sorted(subjects, key=SUBJECTS.index)
    assert [path for path in dict.fromkeys(finding.path for finding in findings)] == [None, str(first), str(second)]
    assert findings[-1].subject == "plan"


def test_the_document_explains_every_subject_in_order():
    rows = re.findall(r"^\| ([^|]+?) \| ", DOCUMENT.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert [row for row in rows if row in SUBJECTS] == list(SUBJECTS)


def test_a_plan_that_cannot_be_made_leaves_the_rest(tmp_path):
    findings = {finding.subject: finding for finding in examine(config_of(tmp_path / "nowhere"), lambda: tiny_gpt)}
    assert findings["directory"].status is Status.FAILURE and "plan" not in findings
    assert findings["kernel AIO"].found


def test_without_paths_there_is_nothing_on_nvme_and_a_device_that_is_missing_ends_the_gpus_lines():
    findings = {finding.subject: finding for finding in examine(load_config({"device": "cuda:99"}), lambda: tiny_gpt)}
    assert findings["nvme.paths"].status is Status.OK
    assert findings["device"].status is Status.FAILURE
    assert not {"plan", "pinned copies", "GPU memory"} & set(findings)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_files_descriptors_threads_and_settings_are_as_before(tmp_path):
    config = config_of(tmp_path, placement={"param": "nvme", "optimizer": "nvme"}, budgets={"cpu": "64MiB"})
    examine(config, lambda: tiny_gpt)  # what is opened once and for all is open
    before = descriptors(), len(psutil.Process().threads()), threading.active_count(), resource.getrlimit(resource.RLIMIT_NOFILE)
    examine(config, lambda: tiny_gpt)
    assert (descriptors(), len(psutil.Process().threads()), threading.active_count(), resource.getrlimit(resource.RLIMIT_NOFILE)) == before
    assert list(tmp_path.iterdir()) == []
    assert not sys.dont_write_bytecode or os.environ.get("PYTHONDONTWRITEBYTECODE")
    assert not logging.getLogger("infinity").disabled


def test_a_child_with_few_descriptors_is_told_that_the_plan_needs_more(tmp_path):
    """The limit is one below the files of the plan and what the rest of the process may open."""
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); from models import tiny_gpt; from infinity.config import load_config;"
        "from infinity.doctor import examine; config = load_config({'device': 'cpu', 'nvme': {'paths': [sys.argv[2]]}, "
        "'placement': {'param': 'nvme', 'grad': 'nvme', 'optimizer': 'nvme'}, 'budgets': {'cpu': '64MiB'}});"
        "print(*[f'{finding.status}|{finding.found}' for finding in examine(config, lambda: tiny_gpt) if finding.subject == 'open files'])"
    )
    command = [sys.executable, "-c", program, str(Path(__file__).parents[1]), str(tmp_path)]

    def told(hard: int) -> str:
        def lower() -> None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

        return subprocess.run(command, capture_output=True, text=True, check=True, preexec_fn=lower).stdout

    needed = re.search(r"take (\d+)$", told(512).strip())
    assert needed is not None
    if int(needed[1]) > 512:
        pytest.fail("the toy needs more files than a toy should")
    assert told(int(needed[1])).startswith("ok|") and told(int(needed[1]) - 1).startswith("failure|")
