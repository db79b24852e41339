"""`infinity doctor`: the findings as a table on a terminal, as lines in a pipe, or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from infinity.config import Config, load_config
from infinity.doctor import Finding, Status, examine, exit_status
from infinity.functions import load_function

JSON_VERSION = 1
"""Raised when a key of the JSON changes its meaning or goes; new keys do not raise it. The form is in docs/doctor.md."""

_STYLES = {Status.OK: "green", Status.WARNING: "yellow", Status.FAILURE: "bold red"}


def run_doctor(target: Path | None, settings: Sequence[str], as_json: bool) -> int:
    """Examine the machine for a configuration, else for the defaults with the current directory as path. Returns the exit status."""
    config = load_config({"nvme": {"paths": ["."]}} if target is None else target, settings)
    model, folders = config.train.model, [Path.cwd() if target is None else target.absolute().parent, Path.cwd()]
    findings = examine(config, None if model is None else lambda: load_function("train.model", model, folders))
    if as_json:
        print(json.dumps(as_table(target, config, findings), indent=1))
    else:
        show(Console(), _heading(target, config), findings)
    return exit_status(findings)


def as_table(target: Path | None, config: Config, findings: Sequence[Finding]) -> dict[str, object]:
    """What `--json` prints."""
    return {
        "version": JSON_VERSION,
        "config": None if target is None else str(target),
        "paths": [entry.path for entry in config.nvme.paths],
        "exit_status": exit_status(findings),
        "findings": [asdict(finding) for finding in findings],
    }


def _heading(target: Path | None, config: Config) -> str:
    paths = ", ".join(entry.path for entry in config.nvme.paths) or "none"
    if target is not None:
        return f"{target}: NVMe paths {paths}"
    here = [entry.path for entry in config.nvme.paths] == [str(Path.cwd())]
    return f"no CONFIG: defaults, with {'the current directory as ' if here else ''}NVMe path {paths}"


def show(console: Console, heading: str, findings: Sequence[Finding]) -> None:
    """One table on a terminal. In a pipe a line for each finding and one for its way out, however long they are."""
    say = console.print
    say(heading, markup=False, highlight=False, soft_wrap=True)
    if console.is_terminal:
        say(_table(findings))
    else:
        say("\n".join(_lines(findings)), markup=False, highlight=False, soft_wrap=True)
    say(_summary(findings), markup=False, highlight=False, soft_wrap=True)


def _table(findings: Sequence[Finding]) -> Table:
    table = Table()
    table.add_column("")
    table.add_column("what", no_wrap=True)
    table.add_column("found", ratio=3)
    if any(finding.way_out for finding in findings):
        table.add_column("way out", ratio=2)
    for path, group in groupby(findings, key=lambda finding: finding.path):
        table.add_section()
        if path is not None:
            table.add_row("", "path", Text(path, style="bold"))
        for finding in group:
            mark = Text(finding.status, style=_STYLES[finding.status])
            table.add_row(mark, finding.subject, Text(finding.found), *([Text(finding.way_out)] if len(table.columns) > 3 else []))
    return table


def _lines(findings: Sequence[Finding]) -> list[str]:
    lines: list[str] = []
    width = max((len(finding.subject) for finding in findings), default=0)
    for path, group in groupby(findings, key=lambda finding: finding.path):
        lines += ["", f"{path or 'this machine'}"] if path or not lines else [""]
        for finding in group:
            lines.append(f"{finding.status:<8} {finding.subject:<{width}}  {finding.found}")
            if finding.way_out:
                lines.append(f"{'':<8} {'way out':>{width}}  {finding.way_out}")
    return [*lines, ""]


def _summary(findings: Sequence[Finding]) -> str:
    counts = [sum(finding.status is status for finding in findings) for status in Status]
    words = [f"{count} {status}{'s' if count > 1 and status is not Status.OK else ''}" for count, status in zip(counts, Status, strict=True) if count]
    return ", ".join(words)
