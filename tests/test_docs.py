"""The pages name what there is: every group, option and setting with its default, and nothing that is not there."""

import re
from functools import cache
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
CONF = ROOT / "conf"
GROUPS = sorted(folder.name for folder in CONF.iterdir() if folder.is_dir()
                and folder.name not in ("experiment", "bench", "verify"))
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
DEFAULTS = yaml.safe_load((CONF / "train.yaml").read_text())


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


@cache
def page(group: str) -> str:
    return (ROOT / "docs/options" / f"{group}.md").read_text()


def own_settings(group: str, option: str) -> dict:
    """Dotted name -> value of what the option's file states itself."""
    loaded = yaml.safe_load((CONF / group / f"{option}.yaml").read_text()) or {}
    return {name: value for name, value in leaves(loaded) if name not in ("_target_", "defaults")}


def settings(group: str, option: str) -> dict:
    """And of the options that its defaults list names, as Hydra composes them."""
    found: dict = {}
    for parent in (yaml.safe_load((CONF / group / f"{option}.yaml").read_text()) or {}).get("defaults", []):
        found |= {} if parent == "_self_" else settings(group, parent)
    own = own_settings(group, option)
    hidden = tuple(f"{name}." for name, value in own.items() if value is None)      # null takes the place of a mapping
    return {name: value for name, value in found.items() if not name.startswith(hidden)} | own


def leaves(node: dict, path: str = ""):
    for key, value in node.items():
        if isinstance(value, dict) and value:
            yield from leaves({name: child for name, child in value.items() if name != "_target_"}, f"{path}{key}.")
        else:
            yield path + key, value


def rows(text: str) -> list[tuple[str, list[str], list[str]]]:
    """(heading above, head of the table, cells) of every row of every table on a page."""
    found, heading, head = [], "", []
    for line in text.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ").removesuffix(" (default)")
        if not line.startswith("|"):
            head = []
        elif not head:
            head = cells(line)
        elif set(line) - set("|-: "):
            found.append((heading, head, cells(line)))
    return found


def cells(line: str) -> list[str]:
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line.strip("|"))]


def documented(group: str) -> dict[tuple[str, str], str]:
    """(option, setting) -> default. A column named `default` belongs to the option in the heading; in other tables
    options are columns."""
    found = {}
    for heading, head, row in rows(page(group)):
        if head[0] != "setting":
            continue
        for title, cell in zip(head[1:], row[1:], strict=True):
            option = heading if title == "default" else title
            if cell and option in options(group):
                found[option, row[0].strip("`")] = cell
    return found


def value_of(cell: str):
    value = yaml.safe_load(cell.strip("`"))
    try:
        return float(value) if isinstance(value, str) else value      # YAML 1.1 takes 1e-5 for text
    except ValueError:
        return value


@pytest.mark.parametrize("group", GROUPS)
def test_a_page_names_every_option_and_every_setting_with_its_default(group):
    told = documented(group)
    for option in options(group):
        assert re.search(rf"^(## {option}( \(default\))?$|\| {option} \|)", page(group), re.MULTILINE), option
        missing = own_settings(group, option).keys() - {setting for name, setting in told if name == option}
        assert not missing, f"{option}: {missing}"
    for (option, setting), cell in told.items():
        assert setting in settings(group, option), f"{option} has no setting {setting}"
        assert value_of(cell) == value_of(str(settings(group, option)[setting])) or \
            value_of(cell) == settings(group, option)[setting], f"{option}: {setting} is {cell}"


def test_pages_and_groups_are_the_same():
    assert [path.stem for path in sorted((ROOT / "docs/options").glob("*.md"))] == GROUPS


def test_every_setting_of_the_model_is_explained():
    explained = {row[0].strip("`") for _, head, row in rows(page("model")) if head == ["setting", "meaning"]}
    assert {setting for option in options("model") for setting in settings("model", option)} <= explained


def test_the_table_of_the_readme_names_every_group_and_option_and_marks_the_defaults():
    chosen = {group: option for entry in DEFAULTS["defaults"] if isinstance(entry, dict)
              for group, option in entry.items() if group in GROUPS}
    table = {row[0]: row[1] for _, head, row in rows((ROOT / "README.md").read_text()) if head[0] == "group"}
    assert list(table) == [f"[{group}](docs/options/{group}.md)" for group in chosen]
    for group, default in chosen.items():
        named = table[f"[{group}](docs/options/{group}.md)"].split(", ")
        assert sorted(option.strip("*") for option in named) == options(group)
        marked = [option.strip("*") for option in named if option.startswith("**")]
        assert marked == (default if isinstance(default, list) else [default])


def test_the_settings_of_a_run_are_named():
    readme = (ROOT / "README.md").read_text()
    for name, value in DEFAULTS.items():
        if name not in ("defaults", "hydra", "choices", "tracker"):
            assert f"`{name}`" in readme or f"{name}=" in readme, name
        if isinstance(value, dict) and name in GROUPS:
            assert all(f"`{name}.{setting}`" in page(name) for setting in value)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        path, _, anchor = target.partition("#")
        if not path.startswith(("http://", "https://")):
            assert (document.parent / path).exists(), target
            assert not anchor, f"{target}: link to pages"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_tests_that_are_named_exist(document):
    text = document.read_text()
    assert all((ROOT / path).exists() for path in re.findall(r"\btests/[\w/.]*\w", text))
    functions = set(re.findall(r"^def (test_\w+)", "\n".join(path.read_text() for path in ROOT.glob("tests/**/*.py")),
                               re.MULTILINE))
    named = set(re.findall(r"`(test_\w+)`", text))
    assert named <= functions, named - functions
