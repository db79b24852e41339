"""What `infinity init` writes: documented, and read back as it was."""

from __future__ import annotations

import tomllib

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infinity.config import Config, load_config, write_commented
from infinity.config.section import Section


def fields(section: type[Section] = Config, prefix: str = ""):
    for name, field in section.model_fields.items():
        if isinstance(field.default, Section):
            yield from fields(type(field.default), f"{prefix}{name}.")
        else:
            yield prefix + name, field


def test_every_key_is_documented_and_written():
    text = write_commented(Config())
    for name, field in fields():
        assert field.description, f"{name} has no text under it"
        assert f"\n{name.rpartition('.')[2]} = " in text or f"\n# {name.rpartition('.')[2]} = (unset)" in text, name


def test_every_section_says_what_it_is():
    for name, field in Config.model_fields.items():
        if isinstance(field.default, Section):
            assert type(field.default).__doc__, name


names = st.text(min_size=1, max_size=12).filter(lambda text: "\x00" not in text)
numbers = st.floats(min_value=1e-30, max_value=1e30)
sizes = st.integers(0, 2**50)


def path_tables(**required):
    table = st.fixed_dictionaries({"path": names.map(lambda name: "/" + name), **required}, optional={"max_bytes": sizes})
    return st.lists(table, max_size=3, unique_by=lambda entry: entry["path"])


paths = st.one_of(path_tables(), path_tables(weight=numbers))


@given(
    cpu=st.one_of(st.just("auto"), sizes),
    paths=paths,
    block=st.integers(1, 1 << 18).map(lambda blocks: blocks * 4096),
    lr=numbers,
    norm=st.one_of(st.none(), numbers),
    classes=st.lists(names),
    steps=st.integers(1, 10**9),
)
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_what_is_written_is_read_back(tmp_path_factory, cpu, paths, block, lr, norm, classes, steps):
    values = {
        "budgets": {"cpu": cpu},
        "nvme": {"paths": paths, "block_size": block},
        "optimizer": {"lr": lr, "max_grad_norm": norm},
        "units": {"classes": classes},
        "train": {"steps": steps},
    }
    config = load_config(values)
    path = tmp_path_factory.mktemp("written") / "run.toml"
    path.write_text(write_commented(config), encoding="utf-8")
    assert load_config(path) == config


def test_sizes_are_written_as_people_write_them():
    written = tomllib.loads(write_commented(load_config({"budgets": {"cpu": "3GiB", "hbm": 0, "activations": "1GiB"}})))
    assert written["budgets"] == {"hbm": 0, "activations": "1GiB", "cpu": "3GiB"}
    assert written["nvme"]["block_size"] == "1MiB"
