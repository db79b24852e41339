"""Jobs from text: fio's job files, and the command line, which is the same keys with dashes. Errors name the line or the word."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from infinity.errors import ConfigError
from infinity.workload.job import ALIASES, BLOCK_KEYS, FLAGS, Job


@dataclass(frozen=True, slots=True)
class Setting:
    """One `key=value` and where it stands."""

    key: str
    value: str
    where: str


@dataclass(frozen=True, slots=True)
class JobText:
    """A job as written: its own settings, and the global ones above it."""

    name: str
    where: str
    shared: tuple[Setting, ...] = ()
    own: tuple[Setting, ...] = ()

    def job(self) -> Job:
        """The checked job. Raises ConfigError naming the setting and its line."""
        settings: dict[str, Setting] = {}
        for setting in (*self.shared, *self.own):
            if setting.key in BLOCK_KEYS:
                settings = {key: other for key, other in settings.items() if key not in BLOCK_KEYS}
            settings[setting.key] = setting
        values = {"name": self.name} | {key: setting.value for key, setting in settings.items()}
        base = values.get("kb_base", "1024")
        try:
            return Job.model_validate(values, context={"kb_base": 1000 if base.strip() == "1000" else 1024})
        except ValidationError as error:
            raise ConfigError("\n".join(self._explain(settings, problem) for problem in error.errors())) from error

    def _explain(self, settings: dict[str, Setting], problem: object) -> str:
        assert isinstance(problem, dict)
        message = str(problem["msg"]).removeprefix("Value error, ")
        place = problem["loc"][0] if problem["loc"] else ""
        if place in settings:
            setting = settings[place]
            return f"{setting.where}: {setting.key}={setting.value}: {message}"
        return f"{self.where}: job {self.name}: {message}"

    def options(self) -> dict[str, str]:
        """Its own settings as fio's JSON lists them."""
        return {setting.key: setting.value or "1" for setting in self.own}


@dataclass(slots=True)
class _Reader:
    """Collects settings into jobs, in the order in which they come."""

    shared: list[Setting] = field(default_factory=list)
    jobs: list[JobText] = field(default_factory=list)
    _name: str | None = None
    _where: str = ""
    _own: list[Setting] = field(default_factory=list)

    def begin(self, name: str, where: str) -> None:
        self.end()
        self._name, self._where = name, where

    def add(self, setting: Setting) -> None:
        if setting.key == "name" and self._name not in (None, "global"):
            self._name = setting.value
        elif self._name in (None, "global"):
            self.shared.append(setting)
        else:
            self._own.append(setting)

    def end(self) -> list[JobText]:
        if self._name not in (None, "global"):
            assert self._name is not None
            self.jobs.append(JobText(self._name, self._where, tuple(self.shared), tuple(self._own)))
        self._name, self._own = None, []
        return self.jobs


def read_job_file(path: Path, shared: Sequence[Setting] = ()) -> list[JobText]:
    """The jobs of a file, with `shared` settings of the command line above its own. Raises ConfigError with the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a job file: {getattr(error, 'strerror', None) or 'it is no text'}") from error
    reader = _Reader(list(shared))
    seen_section = False
    for number, raw in enumerate(lines, start=1):
        line, where = raw.strip(), f"{path}:{number}"
        if not line or line[0] in ";#":
            continue
        if section := re.fullmatch(r"\[(.+)\]", line):
            reader.begin(section[1].strip(), where)
            seen_section = True
        elif not seen_section:
            raise ConfigError(f"{where}: {line!r} stands before the first [section]: begin the file with [global] or a job's name in brackets")
        else:
            key, separator, value = line.partition("=")
            reader.add(_setting(key.strip(), value.strip() if separator else None, where))
    if not reader.end():
        raise ConfigError(f"{path}: has no job: add a section with the job's name in brackets, such as [readers]")
    return reader.jobs


def read_words(words: Sequence[str]) -> list[list[JobText]]:
    """Groups of jobs from the command line: the jobs given by --name, then one group for each job file, below the keys that hold for all.

    The jobs of a group run at the same time, groups one after the other. Raises ConfigError naming the word.
    """
    reader = _Reader()
    files: list[Path] = []
    for key, value, word in _options(words):
        if not key:
            files.append(Path(word))
        elif key == "name":
            reader.begin(value or "", word)
        else:
            reader.add(_setting(key, value, word))
    jobs = reader.end()
    groups = [jobs] if jobs else []
    groups += [read_job_file(path, reader.shared) for path in files]
    if not groups:
        raise ConfigError("no job: give --name=NAME and its options, or a job file")
    return groups


def _options(words: Sequence[str]) -> Iterator[tuple[str, str | None, str]]:
    """(key, value, word) for each option, ("", None, word) for a job file."""
    rest = iter(words)
    for word in rest:
        if not word.startswith("-") or word == "-":
            yield "", None, word
            continue
        key, separator, value = word.lstrip("-").partition("=")
        key = key.replace("-", "_")
        if separator:
            yield key, value, word
        elif key in FLAGS or ALIASES.get(key, key) not in Job.model_fields:
            yield key, None, word
        else:
            yield key, next(rest, None), word


def _setting(key: str, value: str | None, where: str) -> Setting:
    name = ALIASES.get(key, key)
    if name not in Job.model_fields:
        raise ConfigError(f"{where}: {key} is not supported{_suggestion(key, (*Job.model_fields, *ALIASES))}")
    if value is None and name not in FLAGS:
        raise ConfigError(f"{where}: {key} needs a value: {key}=VALUE")
    return Setting(name, value or "", where)


def _suggestion(key: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""
