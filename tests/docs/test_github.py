"""What GitHub reads agrees with the project: versions in the workflow, commands in the form."""

import re

import yaml

from tests.house import ROOT

GITHUB = ROOT / ".github"


def test_the_workflow_tries_the_oldest_and_the_newest_torch() -> None:
    job = yaml.safe_load((GITHUB / "workflows" / "ci.yml").read_text())["jobs"]["everything"]
    text = (ROOT / "pyproject.toml").read_text()
    oldest, beyond = re.findall(r'"torch>=2\.(\d+),<2\.(\d+)"', text)[0]
    assert job["strategy"]["matrix"]["torch"] == [f"2.{oldest}", f"2.{int(beyond) - 1}"]
    assert f'requires-python = ">={job["strategy"]["matrix"]["python"][0]}"' in text
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert "TORCH" in (ROOT / ".ci" / "run").read_text()


def test_the_bug_form_asks_for_the_machine_and_the_plan() -> None:
    form = yaml.safe_load((GITHUB / "ISSUE_TEMPLATE" / "bug.yml").read_text())
    asked = {field["id"]: field for field in form["body"]}
    assert "doctor --json" in asked["doctor"]["attributes"]["label"] and "plan" in asked
    assert asked["doctor"]["validations"]["required"]


def test_the_citation_has_the_version_of_the_package() -> None:
    version = yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]
    assert f'version = "{version}"' in (ROOT / "pyproject.toml").read_text()
